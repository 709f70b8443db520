"""Bases of attached drafters that draft chains. Know no layers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from betoken.drafters.drafter import Drafted
from betoken.drafters.side.drafter import SideDrafter
from betoken.drafters.side.parallel_draft import ParallelDraft
from betoken.drafters.side.sequence import Part, SideSequence


class ChainDrafter(SideDrafter[ParallelDraft]):
    """A drafter adds `_begin` and `_draft`."""

    source: ClassVar[str]
    """Source name of its tokens: its spec's name."""

    def _finish(self, draft: ParallelDraft) -> Drafted:
        owner, seq, draft_ids = draft.owner, draft.owner.draft, draft.draft_ids
        owner.context.idle_since_ns = time.perf_counter_ns()
        owner.last = (draft_ids, list(range(-1, len(draft_ids) - 1)), draft.shares)
        if not draft_ids or not self._is_worth(seq, draft.shares):
            return Drafted(seq, [], num_forwards=draft.num_passes)
        return Drafted(seq, draft_ids, sources=[self.source], draft_probs=draft.probs, num_forwards=draft.num_passes)


class ParallelDrafter(ChainDrafter):
    """Drafts a chain in one pass. A drafter adds `_begin`, `_add_block` and `_choose`."""

    def _add_block(self, draft: ParallelDraft, parts: list[Part]) -> list[Part]:
        """Add the rows that score the draft behind the new context of its sequence, given in parts."""
        raise NotImplementedError

    def _num_slots(self, draft: ParallelDraft) -> int:
        """Slots behind the context that the draft's rows take."""
        raise NotImplementedError

    def _choose(self, drafts: Sequence[ParallelDraft], results: tuple[Tensor, ...]) -> None:
        """Complete at least one draft by the results of their rows, which come in the order of the drafts."""
        raise NotImplementedError

    def _draft(self, drafts: list[ParallelDraft], long: Sequence[SideSequence]) -> list[ParallelDraft]:
        begun, parts = [], []
        for owner in long:
            if self._make_room(owner.context, owner.context.num_rows):
                parts += self._rows(owner.context, num_logits=0)
            else:
                owner.context.forget()
        for draft in drafts:
            context = draft.owner.context
            if self._make_room(context, context.num_rows + self._num_slots(draft)):
                parts += self._add_block(draft, self._rows(context, num_logits=0))
                draft.num_passes = 1
                begun.append(draft)
            else:
                context.forget()
        if parts:
            results = self._pass(parts)
            for owner in (*long, *(draft.owner for draft in begun)):
                owner.context.taken_in()
            if begun:
                self._choose(begun, results)
        return begun
