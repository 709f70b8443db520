"""Lookahead decoding split over two devices: this one iterates and collects n-grams, the target verifies them.

A request is answered from the pool at once; steps run on while the target verifies. One forward holds the lookahead
branches of several sequences. Its tokens are chosen with the noise that the target will choose with at their positions.
If the target's tokens depend on the draft, the steps precede the answer, so that it does not depend on time.
Verification by rejection gets guesses without noise, since a guess made from the target's own noise would bias its
tokens.
Source: Fu et al., arXiv:2402.02057, Algorithm 2; its verification branch is the verify worker.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.lookahead.pool import NgramPool, merge_guesses
from betoken.drafters.lookahead.settings import LookaheadSettings
from betoken.drafters.lookahead.window import Window
from betoken.drafters.shared_pages import IdlePages, SharedPages
from betoken.engine.batch import Segment
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.engine.state_table import PageList

SOURCE = "lookahead"
"""Source name of its tokens: its spec's name."""

_MAX_POOLED_AT_ONCE = 1024
"""N-grams of the text, between two looks at what else is to be drafted: some 10 ms. Other sequences' drafts wait
meanwhile."""


@dataclass(slots=True)
class _Lookahead:
    """An open sequence. KV is kept of committed ids only: what a step writes behind them the next one overwrites."""

    settings: LookaheadSettings
    params: SamplingParams
    """Sampling of the rows' tokens."""
    window: Window
    pool: NgramPool
    order: int
    """Among all that share the model's pages."""
    stepped_ns: int = 0
    """When its last step ended (`time.perf_counter_ns`)."""
    page_ids: PageList = field(default_factory=PageList)
    num_kv: int = 0
    """Committed ids whose KV is written."""
    num_wanted: int | None = None
    """Draft tokens asked for; None = no request is open."""
    num_steps_left: int = 0
    """Steps that its last request allows; above 0 it is at work."""
    num_forwards: int = 0
    """Steps since its last draft."""
    num_unpooled: int = 0
    """Committed ids whose n-grams are still to go into the pool; stays 0 unless the pool is seeded."""
    has_foreign_ids: bool = False
    """Whether the target committed an id this model does not have (a padded vocabulary): it cannot be run then."""


class LookaheadDrafter:
    """Hosts one model, the draft model or a replica of the target, for any number of sequences."""

    def __init__(
        self,
        runner: ModelRunner,
        max_rows: int,
        max_prefill_tokens: int,
        settings: LookaheadSettings | None = None,
        pages: SharedPages | None = None,
    ) -> None:
        """`settings`: of sequences without their own. `pages`: of the runner, where other drafters use it too.

        Raises:
            InvalidArgumentError: a window of these settings does not fit a forward.
        """
        self._runner = runner
        self._max_rows = max_rows
        self._max_prefill_tokens = max_prefill_tokens
        self._settings = (settings or LookaheadSettings()).override_within({}, max_rows)
        self._pages = pages or SharedPages(runner.page_table)
        self._pages.join(self)
        self._states: dict[DraftSequence, _Lookahead] = {}  # who waited longest for a forward comes first

    @property
    def has_work(self) -> bool:
        states = self._states.values()
        return any(state.num_wanted is not None or state.num_steps_left or state.num_unpooled for state in states)

    def open(self, sequence: DraftSequence) -> None:
        settings = self._settings.override_within(sequence.settings, self._max_rows)
        rng = random.Random(sequence.params.seed)
        window = Window(settings.window, settings.ngram_size, lambda: rng.choice(sequence.prompt_ids))
        params = replace(sequence.params, temperature=0.0) if sequence.wants_probs else sequence.params
        pool, order = NgramPool(settings.guesses), self._pages.enter()
        state = self._states[sequence] = _Lookahead(settings, params, window, pool, order)
        self._follow(sequence, state, sequence.ids)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        state = self._states[sequence]
        self._follow(sequence, state, ids)
        if not self._can_step(sequence, state):
            state.num_steps_left = 0

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        state = self._states[sequence]
        state.num_wanted = num_tokens
        state.num_steps_left = state.settings.steps if self._can_step(sequence, state) else 0

    def close(self, sequence: DraftSequence) -> None:
        state = self._states.pop(sequence, None)
        if state is not None:
            self._release(state)

    def step(self) -> list[Drafted]:
        """Take in a part of one long text, and answer every request that can be from the pools; when there is none, one
        forward."""
        for seq, state in self._states.items():
            if state.num_unpooled:
                self._pool_text(seq, state)
                break
        waiting = [
            (seq, state)
            for seq, state in self._states.items()
            if state.num_wanted is not None
            and not (seq.draft_affects_output and (state.num_steps_left or state.num_unpooled))
        ]
        if waiting:
            return [self._answer(seq, state) for seq, state in waiting]
        planned = self._plan()
        try:
            self._run(planned)
        except Exception:
            for seq, _ in planned:  # no request is pending: without this it would be retried forever
                self._states[seq].num_steps_left = 0
            raise
        return []

    def page_lists(self) -> Iterator[list[int]]:
        """Page lists of every open sequence."""
        return (state.page_ids for state in self._states.values())

    def idle_pages(self) -> Iterator[IdlePages]:
        """Pages of sequences without steps to do."""
        for state in self._states.values():
            if state.page_ids and not state.num_steps_left:
                yield IdlePages(state.order, state.stepped_ns, state.page_ids, partial(self._release, state))

    def check_integrity(self) -> None:
        """Re-derive the page accounting of the model; raises when it is off."""
        self._pages.check_integrity()

    def _answer(self, sequence: DraftSequence, state: _Lookahead) -> Drafted:
        """The guesses at what follows the last committed id."""
        assert state.num_wanted is not None
        guesses = state.pool.guesses(sequence.ids[-1])
        if not sequence.takes_trees:
            del guesses[1:]
        ids, parents = merge_guesses(guesses, state.num_wanted)
        drafted = Drafted(
            sequence,
            ids,
            unless_chain(parents),
            [SOURCE],
            num_forwards=state.num_forwards,
        )
        state.num_wanted, state.num_forwards = None, 0
        return drafted

    def _plan(self) -> list[tuple[DraftSequence, Segment]]:
        """Segments of the next forward: committed ids without KV, and windows if they fit after them."""
        states = self._states.items()
        active = [(seq, state) for seq, state in states if state.num_steps_left and not state.num_unpooled]
        max_prefill_tokens = self._max_prefill_tokens if len(active) > 1 else self._max_rows
        rows_left = self._max_rows
        planned: list[tuple[DraftSequence, Segment]] = []
        for seq, state in active:
            state.num_kv = min(state.num_kv, len(seq.ids) - 1)  # the last id is the window's first row, every time
            num_missing = len(seq.ids) - 1 - state.num_kv
            has_window = num_missing <= max_prefill_tokens and num_missing + state.window.num_rows <= rows_left
            num_rows = num_missing if has_window else min(num_missing, rows_left, max_prefill_tokens)
            ids = seq.ids[state.num_kv : state.num_kv + num_rows]
            segment = Segment(state.page_ids, state.num_kv, ids, 0, num_committed=len(seq.ids) - 1)
            if has_window:
                state.window.attach(len(seq.ids) - 1, seq.ids[-1])
                nodes, segment.parents = state.window.nodes()
                segment.ids = [*segment.ids, seq.ids[-1], *nodes]
                segment.num_logits = state.window.num_rows
            if not segment.ids:
                continue  # its window fits the next forward
            # For all that the window follows: a part of a prompt would be computed in vain.
            length = len(seq.ids) - 1 + state.window.num_rows
            if not self._pages.make_room(state.order, state.page_ids, length):
                state.num_steps_left = 0
                continue
            self._pages.table.extend(state.page_ids, length)
            planned.append((seq, segment))
            rows_left -= len(segment.ids)
        return planned

    def _run(self, planned: list[tuple[DraftSequence, Segment]]) -> None:
        if not planned:
            return
        logits = self._runner.forward([segment for _, segment in planned]).logits
        stepped = []
        for seq, segment in planned:
            state = self._states[seq] = self._states.pop(seq)
            if segment.num_logits:
                state.num_kv = len(seq.ids)
                stepped.append((seq, state))
            else:
                state.num_kv += len(segment.ids)
        if stepped:
            self._take(stepped, logits)

    def _take(self, stepped: list[tuple[DraftSequence, _Lookahead]], logits: Tensor) -> None:
        """Choose the windows' next tokens from the logits of all their rows, and pool their n-grams."""
        rows: list[int] = []
        groups: list[SampleGroup] = []
        first_row = 0
        for seq, state in stepped:
            for row, path in state.window.asked():
                rows.append(first_row + row)
                groups.append(SampleGroup(state.params, seq.prompt_ids, seq.output_ids + path, (), seq.rules))
            first_row += state.window.num_rows
        token_ids = choose_tokens(logits[rows], groups).token_ids
        first = 0
        for _, state in stepped:
            num_answers = state.window.width + state.window.num_levels - 1
            state.pool.add(state.window.take(token_ids[first : first + num_answers]))
            state.num_steps_left -= 1
            state.stepped_ns = time.perf_counter_ns()
            state.num_forwards += 1
            first += num_answers

    def _follow(self, sequence: DraftSequence, state: _Lookahead, new_ids: list[int]) -> None:
        """Take in what was committed, and put its n-grams into the pool if that is asked for."""
        state.has_foreign_ids = state.has_foreign_ids or max(new_ids, default=0) >= self._runner.info.vocab_size
        if state.settings.seed_from_prompt:
            state.num_unpooled += len(new_ids)
            self._pool_text(sequence, state)

    @staticmethod
    def _pool_text(sequence: DraftSequence, state: _Lookahead) -> None:
        """Put the next n-grams of the text into the pool, no more than take no long time."""
        ids, size = sequence.ids, state.settings.ngram_size
        num_pooled = len(ids) - state.num_unpooled
        last_end = min(len(ids), num_pooled + _MAX_POOLED_AT_ONCE)
        state.pool.add(ids[end - size : end] for end in range(max(size, num_pooled + 1), last_end + 1))
        state.num_unpooled = len(ids) - last_end

    def _can_step(self, sequence: DraftSequence, state: _Lookahead) -> bool:
        """Whether the model knows all the ids and has room for the window behind them, and the pages have."""
        length, window = len(sequence.ids), state.window
        has_room = length + window.reach <= self._runner.info.max_context
        return not state.has_foreign_ids and has_room and length - 1 + window.num_rows <= self._pages.num_slots

    def _release(self, state: _Lookahead) -> None:
        self._pages.table.release(state.page_ids)
        state.num_kv = 0
