"""Block drafters as attached drafters: one pass over a block of mask tokens gives all tokens of a draft.

The block is the last committed token and masks behind it. It sees the keys and values of the context, which come from
the target's states alone and are computed once per position. The next context overwrites the block.
Knows no target, no links and no forwards of the target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.dflash.forward import BlockForward
from betoken.drafters.dflash.settings import DflashSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.choice import Chooser
from betoken.drafters.side.context import LayerContext
from betoken.drafters.side.parallel_draft import ParallelDraft, choose_chains
from betoken.drafters.side.parallel_drafter import ParallelDrafter
from betoken.drafters.side.sequence import Part, SideSequence
from betoken.engine.batch import Segment


@dataclass(slots=True, eq=False)
class BlockContext(LayerContext):
    """Slot p holds the state of position p, which the ids up to p determine."""

    def _keys(self, num_slots: int) -> list[int]:
        return list(self.ids[: max(0, num_slots)])


class DflashDrafter(ParallelDrafter):
    """Hosts one block drafter for any number of sequences."""

    source = "dflash"
    _forward: BlockForward

    def __init__(
        self,
        forward: BlockForward,
        pages: SharedPages,
        state_columns: Sequence[int],
        vocab_size: int,
        max_rows: int,
        settings: DflashSettings | None = None,
    ) -> None:
        """See `SideDrafter`. `vocab_size`: ids of the target.

        Raises:
            FailedPreconditionError: a pass does not hold a block.
        """
        super().__init__(forward, pages, state_columns, max_rows, settings or DflashSettings(), BlockContext)
        self._shape = forward.shape
        if max_rows < self._shape.block_size:
            limit = f"must be at least {self._shape.block_size}, the block_size of the drafter `{self.source}`"
            raise FailedPreconditionError(f"--max-num-batched-tokens = {max_rows}: {limit}")
        self._chooser = Chooser(forward.target_ids, vocab_size)

    def _begin(self, owner: SideSequence, num_tokens: int) -> ParallelDraft | None:
        seq = owner.draft
        num_wanted = min(num_tokens if seq.terms is None else seq.terms.max_tokens, self._shape.num_predicted)
        if num_wanted < 1 or not owner.context.is_current:
            return None
        return ParallelDraft(owner, num_wanted, self._min_share(seq), owner.settings.min_confidence / 100.0)

    def _num_slots(self, draft: ParallelDraft) -> int:
        return self._shape.block_size

    def _add_block(self, draft: ParallelDraft, parts: list[Part]) -> list[Part]:
        context, shape = draft.owner.context, self._shape
        parts = parts if context.num_pending else []  # without news it is the last row, whose keys are there
        ids, start = [context.ids[-1], *[shape.mask_token_id] * (shape.block_size - 1)], context.num_rows
        like = parts[-1].hidden if parts else context.last
        assert like is not None, "no state is known"
        hidden = like.new_zeros(len(ids), shape.hidden_size)
        if parts and len(parts[-1].segment.ids) + len(ids) <= self._max_rows:
            last = parts.pop()
            ids, start = [*last.segment.ids, *ids], last.segment.kv_length
            hidden = torch.cat((last.hidden, hidden))
        num_mutual = 0 if shape.is_causal else shape.block_size
        segment = Segment(context.page_ids, start, ids, shape.block_size, num_mutual=num_mutual)
        return [*parts, Part(segment, hidden)]

    def _choose(self, drafts: Sequence[ParallelDraft], results: tuple[Tensor, ...]) -> None:
        predicting: list[int] = []
        first = 0 if self._shape.predicts_first else 1
        for index, draft in enumerate(drafts):
            draft.first_row = len(predicting)
            start = index * self._shape.block_size + first
            predicting += range(start, start + draft.num_wanted)
        score = _BlockScores(self._forward, results[0][predicting], len(drafts))
        choose_chains(drafts, score, self._chooser, follows=self._forward.following_head is not None)


class _BlockScores:
    """Scores of the positions of blocks, by the tokens before them; see `ScoreRows`."""

    def __init__(self, forward: BlockForward, hidden: Tensor, num_drafts: int) -> None:
        """`hidden`: [N, H] of all positions."""
        self._forward, self._hidden = forward, hidden
        self._logits = forward.logits(hidden)
        head = forward.following_head
        self._state = None if head is None else head.begin(num_drafts, hidden)

    def __call__(
        self, rows: list[int], owners: list[int], previous: list[int]
    ) -> tuple[Tensor, Sequence[float] | None]:
        scores = self._logits if len(rows) == len(self._logits) else self._logits[rows]
        hidden, before = self._hidden[rows], torch.tensor(previous, device=scores.device)
        confidences = self._forward.confidences(hidden, before)
        if self._state is not None:
            scores, state = self._forward.correct(scores, hidden, before, self._state[owners])
            self._state[owners] = state
        return scores, confidences
