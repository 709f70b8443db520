"""P-EAGLE layers as attached drafter: one pass over mask tokens behind the text gives all tokens of a draft.

The row of the last known state predicts the first token, and each mask row a further one. Keys of masks are overwritten
by the next true states. Knows no target, no links and no forwards of the target's.
Source: P-EAGLE, arXiv:2602.01469.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from betoken.drafters.eagle3.forward import LayerForward
from betoken.drafters.eagle3.settings import ParallelEagleSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.choice import Chooser
from betoken.drafters.side.parallel_draft import ParallelDraft, choose_chains
from betoken.drafters.side.parallel_drafter import ParallelDrafter
from betoken.drafters.side.sequence import Part, SideSequence
from betoken.engine.batch import Segment


class ParallelEagleDrafter(ParallelDrafter):
    """Hosts the layers for any number of sequences."""

    source = "eagle3"

    def __init__(
        self, forward: LayerForward, pages: SharedPages, state_columns: Sequence[int], vocab_size: int, max_rows: int
    ) -> None:
        """See `SideDrafter`. `vocab_size`: ids of the target."""
        super().__init__(forward, pages, state_columns, max_rows, ParallelEagleSettings())
        self._chooser = Chooser(forward.target_ids, vocab_size)
        self._mask_input = forward.mask_input()
        assert forward.shape.mask_token_id is not None
        self._mask_token_id = forward.shape.mask_token_id

    def _begin(self, owner: SideSequence, num_tokens: int) -> ParallelDraft | None:
        seq = owner.draft
        num_wanted = num_tokens if seq.terms is None else seq.terms.max_tokens
        num_wanted = min(num_wanted, owner.settings.max_depth, self._max_rows)
        if num_wanted < 1 or not owner.context.is_current:
            return None
        return ParallelDraft(owner, num_wanted, self._min_share(seq))

    def _num_slots(self, draft: ParallelDraft) -> int:
        return draft.num_wanted - 1

    def _add_block(self, draft: ParallelDraft, parts: list[Part]) -> list[Part]:
        num_masks = draft.num_wanted - 1
        segment, hidden = parts.pop()
        num_before = len(segment.ids) - 1 if len(segment.ids) + num_masks > self._max_rows else 0
        page_ids, start, ids = segment.page_ids, segment.kv_length, segment.ids
        if num_before:
            parts.append(Part(Segment(page_ids, start, ids[:num_before], 0), hidden[:num_before]))
        ids = [*ids[num_before:], *[self._mask_token_id] * num_masks]
        hidden = torch.cat((hidden[num_before:], self._mask_input.expand(num_masks, -1)))
        return [*parts, Part(Segment(page_ids, start + num_before, ids, draft.num_wanted), hidden)]

    def _choose(self, drafts: Sequence[ParallelDraft], results: tuple[Tensor, ...]) -> None:
        scores, first = results[0], 0
        for draft in drafts:
            draft.first_row, first = first, first + draft.num_wanted
        choose_chains(drafts, lambda rows, owners, previous: (scores[rows], None), self._chooser)
