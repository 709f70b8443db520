"""A small language model as drafter: batched over sequences, with the target's own noise.

Every step runs one forward over all drafting sequences: their next row each, and chunks of what their KV still misses.
Rejected drafts need no undoing: KV is kept by ids, and whatever agrees with the committed ids stays (resync by ids).
For verification by rejection the noise is the drafter's own, and each draft token comes with what it was sampled from.
Proposed next tokens of the draft model, if a sequence has some, are verified in the same forward by the target's rule.
Where branches are wanted and the sequence takes trees, the draft is a tree (`model_tree`) grown by the same forwards.
Between its drafts it may draft ahead for the outcomes of their verification (`ahead_steps`).
A PARD model drafts all tokens in one forward (`parallel`).
Source: shared-noise drafting, Daliri, Musco, Suresh, arXiv:2408.07978.
"""

import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate

from torch import Tensor

from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted, DraftedAhead, DraftSequence
from betoken.drafters.model.ahead_steps import AheadSteps
from betoken.drafters.model.parallel import ParallelDrafting
from betoken.drafters.model.sequence import DraftKV, Guesser, Planned, chain_part, tree_part
from betoken.drafters.model.settings import ModelSettings
from betoken.drafters.model.tokens import Place, add_children, choose_draft_tokens, sample_group
from betoken.drafters.model.tree import ModelTree
from betoken.drafters.shared_pages import IdlePages, SharedPages
from betoken.engine.runner import ModelRunner
from betoken.engine.tree import KeptPath
from betoken.kernels.accept import accept_block

SOURCE = "model"
"""Source name of its tokens: its spec's name."""
_SHORT_ROWS = 32
"""Longest segment that is never split if others share the forward: the tokens that a round commits."""


class ModelDrafter:
    """Hosts one draft model for any number of sequences."""

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        max_prefill_tokens: int,
        source: str = SOURCE,
        settings: ModelSettings | None = None,
        pages: SharedPages | None = None,
        mask_token_id: int | None = None,
    ) -> None:
        """Args:
        source: name of the drafter that its tokens are credited to.
        settings: defaults of sequences without their own.
        pages: pages of the runner, where other drafters use it too.
        mask_token_id: mask token of a PARD model; None for other models.
        """
        self._source = source
        self._settings = settings or ModelSettings()
        self._runner = runner
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._caches: dict[DraftSequence, DraftKV] = {}
        self._pages = pages or SharedPages(runner.page_table)
        self._pages.join(self)
        self._ahead = AheadSteps(runner, max_rows, self._caches, source, mask_token_id)
        self._parallel = ParallelDrafting(mask_token_id, source) if mask_token_id is not None else None
        self._max_length = runner.info.max_context

    @property
    def mask_token_id(self) -> int | None:
        """Mask token of a PARD model; None if drafts take a forward per token."""
        return self._parallel.mask_token_id if self._parallel is not None else None

    @property
    def has_work(self) -> bool:
        return any(kv.num_wanted is not None for kv in self._caches.values())

    def open(self, sequence: DraftSequence) -> None:
        settings = self._settings.override(sequence.settings)
        self._take_in(sequence, DraftKV(settings=settings))

    def open_guessed(self, sequence: DraftSequence, guesser: Guesser) -> None:
        """`open`, whatever the settings, with guesses at the model's tokens; its drafts are chains."""
        self._take_in(sequence, DraftKV(guesser=guesser))

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """Keep the KV of what was guessed right: the longest common prefix with the committed ids."""
        kv = self._caches[sequence]
        kv.has_foreign_ids = kv.has_foreign_ids or self._has_foreign_ids(ids)
        length = len(sequence.ids) - len(ids)
        if (found := kv.settle(ids)) is not None and found.rows:
            if found.rows != list(range(len(found.rows))):
                self._runner.compact([KeptPath(kv.page_ids, length, found.rows)])
            kv.kv_ids[length:] = [*ids, *found.ids][: len(found.rows)]
            return
        num_kept = min(length, len(kv.kv_ids))
        while num_kept < min(len(kv.kv_ids), len(sequence.ids)) and kv.kv_ids[num_kept] == sequence.ids[num_kept]:
            num_kept += 1
        del kv.kv_ids[num_kept:]
        if kv.guesser is not None:
            kv.guesser.follow()

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        kv = self._caches[sequence]
        kv.draft_ids, kv.draft_probs, kv.sources, kv.candidates = [], [], [], []
        room = self._max_length - len(sequence.ids)
        if self._parallel is not None:
            room = min(room, self._max_rows)
        kv.num_wanted = 0 if kv.has_foreign_ids else max(0, min(num_tokens, room))
        takes_tree = kv.settings.max_branches > 1 and sequence.takes_trees and not sequence.wants_probs
        if takes_tree and kv.num_wanted > 1:
            max_depth = min(kv.settings.max_depth or kv.num_wanted, kv.num_wanted)
            kv.tree = ModelTree(kv.num_wanted, kv.settings.max_branches, max_depth, sequence.end_ids)
        kv.num_outcomes = self._ahead.num_outcomes(sequence, kv)
        kv.use_ready(sequence.end_ids, self._source)
        # The last known id is always fed: its row gives the next one.
        del kv.kv_ids[len(sequence.ids) + len(kv.draft_ids) - 1 :]

    def close(self, sequence: DraftSequence) -> None:
        kv = self._caches.pop(sequence, None)
        if kv is not None:
            self._release(kv)

    def step(self) -> list[Drafted]:
        """One forward over every drafting sequence; the drafts that are now complete."""
        planned = self._plan()
        if planned:
            try:
                logits = self._runner.forward([part.segment for part in planned]).logits
                self._take_logits(planned, logits)
            except Exception:
                self._begin_trees_anew(planned)
                raise
            self._note_written(planned)
        return self._take_finished()

    @property
    def has_ahead_work(self) -> bool:
        """See `AheadDrafter`."""
        return self._ahead.has_work

    def step_ahead(self) -> list[DraftedAhead]:
        """See `AheadDrafter`."""
        return self._ahead.step()

    def page_lists(self) -> Iterator[list[int]]:
        """Page lists of every open sequence."""
        return (kv.page_ids for kv in self._caches.values())

    def idle_pages(self) -> Iterator[IdlePages]:
        """Pages of sequences that are not drafting."""
        for kv in self._caches.values():
            if kv.page_ids and kv.num_wanted is None:
                yield IdlePages(kv.order, kv.idle_since_ns, kv.page_ids, partial(self._release, kv))

    def check_integrity(self) -> None:
        """Re-derive the page accounting of the model; raises when it is off."""
        self._pages.check_integrity()

    def _plan(self) -> list[Planned]:
        """The next forward: short segments first. With them, sequences that miss more, of prompts or after pauses,
        share `max_prefill_tokens` tokens."""
        for seq, kv in self._caches.items():
            if kv.is_drafting and not kv.page_ids:
                self._start(seq, kv)
        waiting = [(self._num_missing(seq, kv), seq, kv) for seq, kv in self._caches.items() if kv.is_drafting]
        waiting.sort(key=lambda entry: entry[0])
        rows_left, short = self._max_rows, min(_SHORT_ROWS, self._max_prefill_tokens)
        prefill_left = self._max_prefill_tokens if waiting and waiting[0][0] <= short else rows_left
        planned: list[Planned] = []
        for num_missing, seq, kv in waiting:
            num_rows = min(num_missing, rows_left, rows_left if num_missing <= short else prefill_left)
            masks = self._parallel.masks(kv) if self._parallel is not None else []
            if num_rows == num_missing and num_rows + len(masks) > rows_left:
                num_rows -= 1  # the last id and the masks share a forward
            if num_rows == 0:
                break
            num_rows = self._runner.page_table.stop_before(kv.page_ids, kv.num_written, kv.num_written + num_rows)
            num_rows -= kv.num_written
            guesses = (masks or self._guess(seq, kv, rows_left - num_rows)) if num_rows == num_missing else []
            length = kv.num_written + num_rows + len(guesses)
            if not self._pages.make_room(kv.order, kv.page_ids, length):
                kv.stop()
                continue
            self._runner.page_table.extend(kv.page_ids, length)
            if kv.tree is not None and kv.tree.is_begun:
                part = tree_part(seq, kv, kv.tree, num_rows)
            else:
                part = chain_part(seq, kv, num_rows, guesses, is_whole=num_rows == num_missing)
            planned.append(part)
            rows_left -= len(part.segment.ids)
            prefill_left -= num_rows if num_missing > short else 0
        return planned

    def _start(self, seq: DraftSequence, kv: DraftKV) -> None:
        """Pages for all committed tokens and the draft, or no draft: a part would be wasted work."""
        table = self._runner.page_table
        assert kv.num_wanted is not None
        length = len(seq.ids) + kv.num_wanted - 1
        kv.page_ids = table.find(seq.ids[:-1])
        if self._pages.make_room(kv.order, kv.page_ids, length):
            kv.kv_ids = seq.ids[: len(kv.page_ids) * table.page_size]
            table.extend(kv.page_ids, length)
        else:
            self._release(kv)
            kv.stop()

    @staticmethod
    def _num_missing(seq: DraftSequence, kv: DraftKV) -> int:
        """Rows until the model says something new."""
        if kv.tree is not None and kv.tree.is_begun:
            return len(kv.tree.to_expand())
        return len(seq.ids) + len(kv.draft_ids) - len(kv.kv_ids)

    def _guess(self, seq: DraftSequence, kv: DraftKV, rows_left: int) -> list[int]:
        """Guesses at the next tokens but the last that is wanted, which the forward gives in any case."""
        assert kv.num_wanted is not None
        num_tokens = min(rows_left, kv.num_wanted - len(kv.draft_ids) - 1)
        if kv.guesser is None or num_tokens < 1 or seq.wants_probs:
            return []
        guesses = kv.guesser.guess(kv.draft_ids, num_tokens)
        return [] if self._has_foreign_ids(guesses) else guesses

    def _take_logits(self, planned: Sequence[Planned], logits: Tensor) -> None:
        if self._parallel is not None:
            self._take_parallel(self._parallel, [part.sequence for part in planned if part.segment.num_logits], logits)
            return
        trees = [part for part in planned if part.nodes]
        chains = [(part.sequence, part.guesses) for part in planned if part.has_tokens]
        if trees and chains:
            is_tree_row = [bool(part.nodes) for part in planned for _ in range(part.segment.num_logits)]
            self._grow_trees(trees, logits[[row for row, is_tree in enumerate(is_tree_row) if is_tree]])
            self._take_tokens(chains, logits[[row for row, is_tree in enumerate(is_tree_row) if not is_tree]])
        elif trees:
            self._grow_trees(trees, logits)
        elif chains:
            self._take_tokens(chains, logits)

    def _take_parallel(self, parallel: ParallelDrafting, sequences: Sequence[DraftSequence], logits: Tensor) -> None:
        chains = parallel.take([(seq, self._caches[seq]) for seq in sequences], logits)
        groups, first_rows = [chain.first_group for chain in chains], [chain.rows.start for chain in chains]
        self._ahead.note_candidates([chain.sequence for chain in chains], groups, first_rows, logits)

    def _begin_trees_anew(self, planned: Sequence[Planned]) -> None:
        """Needed after a fault, or rows given out by trees would count as written. The host drops the drafts of the
        drafter it stepped; others in this model go on."""
        for part in planned:
            num_wanted = self._caches[part.sequence].num_wanted
            if part.nodes and num_wanted is not None:
                self.request(part.sequence, num_wanted)

    def _note_written(self, planned: Sequence[Planned]) -> None:
        """Count on the KV of the rows; only once their logits were taken, or a fault would leave nothing to ask for."""
        for part in planned:
            seq, kv = part.sequence, self._caches[part.sequence]
            kv.num_forwards += part.segment.num_logits > 0
            if part.segment.parents is None:
                kv.kv_ids.extend(part.segment.ids)
            if self._parallel is not None:
                del kv.kv_ids[len(seq.ids) :]  # the masks'
            elif part.has_tokens:
                del kv.kv_ids[len(seq.ids) + len(kv.draft_ids) - 1 :]  # what refused guesses wrote
            self._runner.page_table.publish(kv.page_ids, seq.ids, self._num_shared(seq, kv))

    def _num_shared(self, seq: DraftSequence, kv: DraftKV) -> int:
        """Slots that other sequences may take over."""
        return min(len(kv.kv_ids), len(seq.ids) - 1)  # the last committed id is fed again

    def _grow_trees(self, planned: Sequence[Planned], logits: Tensor) -> None:
        places = [
            Place(part.sequence, tree, node)
            for part in planned
            if (tree := self._caches[part.sequence].tree)
            for node in part.nodes
        ]
        add_children(places, logits)

    def _take_tokens(self, drafting: list[tuple[DraftSequence, list[int]]], logits: Tensor) -> None:
        """Append what the model says in place of each sequence's guesses: those it agrees with, and its next token."""
        groups = [sample_group(seq, self._caches[seq].draft_ids, guesses) for seq, guesses in drafting]
        tokens = choose_draft_tokens(logits, groups, [seq for seq, _ in drafting])
        first_rows = list(accumulate((group.num_rows for group in groups), initial=0))
        self._ahead.note_candidates([seq for seq, _ in drafting], groups, first_rows, logits)
        for (seq, guesses), first_row in zip(drafting, first_rows, strict=False):
            kv = self._caches[seq]
            own = tokens[first_row : first_row + len(guesses) + 1]
            path, _ = accept_block([token.token_id for token in own], guesses)
            for index, token in enumerate(own[: len(path) + 1]):
                source = kv.guesser.source if kv.guesser and index < len(path) else self._source
                kv.add_token(token, source, seq.end_ids)
                if not kv.is_drafting:
                    break

    def _take_finished(self) -> list[Drafted]:
        finished = []
        for seq, kv in self._caches.items():
            if kv.num_wanted is not None and not kv.is_drafting:
                drafted = self._finish_tree(seq, kv, kv.tree) if kv.tree is not None else self._finish(seq, kv)
                drafted.num_forwards = kv.num_forwards
                drafted.num_ahead_ids, drafted.num_ahead_tokens = kv.num_ahead_ids, kv.num_ahead_tokens
                finished.append(drafted)
                kv.num_wanted, kv.tree, kv.num_forwards = None, None, 0
                kv.num_ahead_ids, kv.num_ahead_tokens = None, 0
                kv.idle_since_ns = time.perf_counter_ns()
                self._ahead.begin(seq, kv)
                kv.draft_ids, kv.draft_probs, kv.sources, kv.candidates = [], [], [], []
        return finished

    @staticmethod
    def _finish(seq: DraftSequence, kv: DraftKV) -> Drafted:
        return Drafted(seq, kv.draft_ids, sources=kv.sources, draft_probs=kv.draft_probs)

    def _finish_tree(self, seq: DraftSequence, kv: DraftKV, tree: ModelTree) -> Drafted:
        # Non-contiguous rows of an accepted path are recomputed in the next draft's first forward. They cost
        # almost nothing there; moving them would need a separate call.
        if self._parallel is None:
            kv.kv_ids.extend(tree.leading_ids())
        draft_ids, parents = tree.best()
        return Drafted(seq, draft_ids, unless_chain(parents), [self._source] * len(draft_ids))

    def _take_in(self, sequence: DraftSequence, kv: DraftKV) -> None:
        kv.order, kv.has_foreign_ids = self._pages.enter(), self._has_foreign_ids(sequence.ids)
        self._caches[sequence] = kv

    def _release(self, kv: DraftKV) -> None:
        if kv.page_ids:
            self._runner.page_table.release(kv.page_ids)
        kv.page_ids = []
        kv.kv_ids = []
        kv.ahead = None

    def _has_foreign_ids(self, ids: list[int]) -> bool:
        return bool(ids) and max(ids) >= self._runner.info.vocab_size
