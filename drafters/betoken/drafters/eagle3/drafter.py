"""A layer of the EAGLE family as attached drafter: it reads the target's states and drafts trees or chains.

After each result the layer processes the accepted positions with their true states; KV made from its own output
while drafting is overwritten. One pass serves all drafting sequences: first their new positions, then a level of each
one's tree after the other. Knows no target, no links and no forwards of the target's.
Source: Li et al., EAGLE-3, arXiv:2503.01840, and EAGLE-2, arXiv:2406.16858.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from betoken.common.economy.acceptance import Calibration
from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.eagle3.choice import Children, Chooser
from betoken.drafters.eagle3.context import LayerContext
from betoken.drafters.eagle3.forward import LayerForward
from betoken.drafters.eagle3.pass_price import PassPrice
from betoken.drafters.eagle3.sequence import EagleDraft, EagleSequence, Part
from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.eagle3.tree import DynamicTree
from betoken.drafters.features import FeatureSpan
from betoken.drafters.shared_pages import IdlePages, SharedPages
from betoken.engine.batch import Segment, build_batch

SOURCE = "eagle3"
"""Source name of its tokens: its spec's name."""

_MANY_ROWS = 64
"""A sequence with so many rows to take in is given a pass though it does not draft: a long prompt comes in chunks."""


class EagleDrafter:
    """Hosts one layer for any number of sequences; a `FeatureReader`."""

    def __init__(
        self,
        forward: LayerForward,
        pages: SharedPages,
        state_columns: Sequence[int],
        vocab_size: int,
        max_rows: int,
        settings: EagleSettings | None = None,
    ) -> None:
        """Args:
        pages: pages of the layer's cache.
        state_columns: indices of the layer's states among the received features, in the layer's order.
        vocab_size: ids of the target.
        max_rows: most rows of a pass.
        settings: defaults of sequences without their own.
        """
        self._forward, self._pages, self._max_rows = forward, pages, max_rows
        self._columns = list(state_columns)
        self._settings = settings or EagleSettings()
        self._chooser = Chooser(forward.target_ids, vocab_size)
        self._calibration = Calibration()
        self._price = PassPrice()
        self._sequences: dict[DraftSequence, EagleSequence] = {}
        self._requests: dict[DraftSequence, int] = {}
        self._at_work: set[EagleSequence] = set()
        pages.join(self)

    @property
    def has_work(self) -> bool:
        """Whether a draft is wanted, or a long text is to be taken in."""
        return bool(self._requests) or any(
            owner.context.num_pending >= _MANY_ROWS for owner in self._sequences.values()
        )

    def open(self, sequence: DraftSequence) -> None:
        """Take a sequence in, with its settings."""
        settings = self._settings.override(sequence.settings)
        context = LayerContext(sequence.ids, self._pages.table, self._pages.enter())
        self._sequences[sequence] = EagleSequence(sequence, settings, context)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """Learn the result of the last draft; `observe` receives the states of `ids`."""
        owner = self._sequences[sequence]
        self._price.add_tokens(len(ids))
        if owner.last is not None and not sequence.draft_affects_output:
            self._calibration.learn(*owner.last, ids)
        owner.last = None

    def observe(self, spans: Sequence[FeatureSpan], features: Tensor) -> None:
        """See `FeatureReader`."""
        in_order = self._columns == list(range(features.shape[1]))
        hidden = self._forward.fuse(features if in_order else features[:, self._columns])
        for span in spans:
            self._sequences[span.sequence].context.add_states(span.first_position, hidden[span.rows])

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        """Queue a draft; its size may follow the sequence's terms."""
        self._requests[sequence] = num_tokens

    def close(self, sequence: DraftSequence) -> None:
        """Forget the sequence; what it computed stays for others that begin alike."""
        self._requests.pop(sequence, None)
        owner = self._sequences.pop(sequence, None)
        if owner is not None:
            owner.context.forget()

    def step(self) -> list[Drafted]:
        """Process the received states, and answer every request: a draft is useful only before the next forward."""
        requests, self._requests = self._requests, {}
        if requests:
            self._price.begin_round(time.perf_counter_ns())
        drafts = [draft for seq, num in requests.items() if (draft := self._begin(self._sequences[seq], num))]
        drafting = {draft.owner for draft in drafts}
        long = [
            owner
            for owner in self._sequences.values()
            if owner.context.num_pending >= _MANY_ROWS and owner not in drafting
        ]
        self._at_work = drafting.union(long)
        try:
            finished = {draft.owner.draft: self._finish(draft) for draft in self._draft(drafts, long)}
        finally:
            self._at_work = set()
        return [finished.get(seq) or Drafted(seq, []) for seq in requests]

    def page_lists(self) -> Iterator[list[int]]:
        """Page lists of every open sequence."""
        return (owner.context.page_ids for owner in self._sequences.values())

    def idle_pages(self) -> Iterator[IdlePages]:
        """Pages of sequences for which no draft is wanted."""
        for seq, owner in self._sequences.items():
            context = owner.context
            if context.page_ids and seq not in self._requests and owner not in self._at_work:
                yield IdlePages(context.order, context.idle_since_ns, context.page_ids, context.forget)

    def check_integrity(self) -> None:
        """Re-derive the page accounting of the layer; raises when it is off."""
        self._pages.check_integrity()

    def _begin(self, owner: EagleSequence, num_tokens: int) -> EagleDraft | None:
        """An empty draft; None if nothing can be drafted."""
        seq, terms = owner.draft, owner.draft.terms
        num_nodes = num_tokens if terms is None else terms.max_tokens
        if num_nodes < 1 or not owner.context.is_current:
            return None
        min_share = 0.0 if terms is None else self._calibration.share(terms.row_price)
        tree = DynamicTree(
            num_nodes,
            owner.settings.max_branches if seq.takes_trees and not seq.wants_probs else 1,
            owner.settings.max_depth,
            end_ids=seq.end_ids,
            min_score=math.log(min_share) if min_share > 0.0 else -math.inf,
        )
        return EagleDraft(owner, tree)

    def _draft(self, drafts: list[EagleDraft], long: Sequence[EagleSequence]) -> list[EagleDraft]:
        """Run passes until the drafts are complete; return the started ones, without drafts whose pages ran out."""
        begun, parts = [], []
        for owner in long:
            if self._make_room(owner.context, owner.context.num_rows):
                parts += self._rows(owner.context, num_logits=0)
            else:
                owner.context.forget()
        for draft in drafts:
            if self._make_room(draft.owner.context, draft.owner.context.num_rows):
                parts += self._rows(draft.owner.context, num_logits=1)
                begun.append(draft)
            else:
                draft.owner.context.forget()
        if parts:
            scores, fed_back = self._pass(parts)
            for owner in (*long, *(draft.owner for draft in begun)):
                owner.context.taken_in()
            self._grow(begun, scores, fed_back)
        return begun

    def _grow(self, drafts: Sequence[EagleDraft], scores: Tensor, fed_back: Tensor) -> None:
        """Hang the likeliest ids below the nodes that were asked, and ask the next levels, while there are any."""
        while drafts:
            self._add_children(drafts, scores)
            parts, rows, first_row = [], [], 0
            growing = []
            pays = sum(self._gain(draft) for draft in drafts) > self._price.price
            for draft in drafts:
                tree, num_asked = draft.tree, draft.num_asked
                if tree.level and (pays or not draft.is_priced) and self._make_room(draft.owner.context, draft.length):
                    rows += [first_row + place for place in tree.level_parents]
                    parts.append(draft.segment())
                    growing.append(draft)
                else:
                    tree.stop()
                first_row += num_asked
            drafts = growing
            if parts:
                index = torch.tensor(rows, device=fed_back.device)
                hidden = fed_back.index_select(0, index)
                offsets = [0, *accumulate(len(part.ids) for part in parts)]
                scores, fed_back = self._pass(
                    [Part(part, hidden[a:b]) for part, a, b in zip(parts, offsets, offsets[1:], strict=False)]
                )

    def _gain(self, draft: EagleDraft) -> float:
        """Tokens that one more pass may bring: as many of those it asks go on as went on before."""
        if not draft.is_priced:
            return 0.0
        before, draft.reach = draft.reach, sum(self._calibration.score(share) for share in draft.tree.level_shares)
        return draft.reach * min(1.0, draft.reach / before) if before > 0.0 else 0.0

    def _add_children(self, drafts: Sequence[EagleDraft], scores: Tensor) -> None:
        places = [(draft, node) for draft in drafts for node in draft.tree.level]
        groups = [draft.group(node) for draft, node in places]
        private = [row for row, (draft, _) in enumerate(places) if draft.owner.draft.wants_probs]
        children: dict[int, Children] = {}
        if private:
            sampled = self._chooser.sampled(scores[private], [groups[row] for row in private])
            for row, (token_id, probs) in zip(private, sampled, strict=True):
                places[row][0].probs.append(probs)
                children[row] = ([token_id], [0.0])
        shared = [row for row in range(len(places)) if row not in children]
        if shared:
            num_top = max(places[row][0].tree.max_branches for row in shared)
            rows = scores if not private else scores[shared]
            found = self._chooser.likeliest(rows, [groups[row] for row in shared], num_top)
            children |= zip(shared, found, strict=True)
        row = 0
        for draft in drafts:
            draft.num_asked = len(draft.tree.level)
            draft.num_passes += 1
            draft.tree.add([children[row + place] for place in range(draft.num_asked)])
            row += draft.num_asked

    def _finish(self, draft: EagleDraft) -> Drafted:
        owner, seq = draft.owner, draft.owner.draft
        owner.context.idle_since_ns = time.perf_counter_ns()
        draft_ids, parents, scores = draft.tree.best()
        shares = [math.exp(score) for score in scores]
        owner.last = (draft_ids, parents, shares)
        if seq.terms is not None and not seq.terms.is_worth([self._calibration.score(share) for share in shares]):
            return Drafted(seq, [], num_forwards=draft.num_passes)
        return Drafted(
            seq,
            draft_ids,
            unless_chain(parents),
            [SOURCE],
            draft_probs=draft.probs[: len(draft_ids)],
            num_forwards=draft.num_passes,
        )

    def _make_room(self, context: LayerContext, length: int) -> bool:
        """Give the sequence pages for so many slots, of others' if need be."""
        if not self._pages.make_room(context.order, context.page_ids, length):
            return False
        self._pages.table.extend(context.page_ids, length)
        return True

    def _rows(self, context: LayerContext, num_logits: int) -> list[Part]:
        """A context's next input, in parts that a pass holds."""
        first, ids, hidden = context.rows()
        parts = []
        for start in range(0, len(ids), self._max_rows):
            end = min(start + self._max_rows, len(ids))
            segment = Segment(context.page_ids, first + start, ids[start:end], num_logits if end == len(ids) else 0)
            parts.append(Part(segment, hidden[start:end]))
        return parts

    def _pass(self, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        """Run the parts in their order, as many at a time as a pass holds; scores and what is fed back of all."""
        outputs: list[tuple[Tensor, Tensor]] = []
        first = 0
        while first < len(parts):
            end, num_rows = first, 0
            while end < len(parts) and num_rows + len(parts[end].segment.ids) <= self._max_rows:
                num_rows += len(parts[end].segment.ids)
                end += 1
                if end < len(parts) and parts[end].segment.page_ids is parts[end - 1].segment.page_ids:
                    break  # the next rows of the same sequence read what these write
            taken = parts[first:end]
            batch = build_batch([part.segment for part in taken], self._pages.table.page_size, self._max_rows)
            hidden = taken[0].hidden if len(taken) == 1 else torch.cat([part.hidden for part in taken])
            began_ns = time.perf_counter_ns()
            outputs.append(self._forward(batch, hidden))
            self._price.add_pass(time.perf_counter_ns() - began_ns)
            first = end
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat([scores for scores, _ in outputs]), torch.cat([fed_back for _, fed_back in outputs])
