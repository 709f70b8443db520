"""Several MTP layers as attached drafter: the layer of index j predicts the draft token j, as in training.

Each layer has its own KV. A row of layer j reads the token j places after the row's own, and the output of layer j - 1.
So a pass over all new rows of a text runs layer by layer, and the last rows, whose tokens were drafted, run again with
the committed ones. Drafts are chains. Knows no target, no links and no forwards of the target's.
Source: DeepSeek-V3, arXiv:2412.19437, and `MTPCandidateGenerator` of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from betoken.drafters.mtp.forward import MtpForward
from betoken.drafters.mtp.settings import ChainedMtpSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.choice import Chooser
from betoken.drafters.side.context import LayerContext
from betoken.drafters.side.parallel_draft import ParallelDraft, choose_chains
from betoken.drafters.side.parallel_drafter import ChainDrafter
from betoken.drafters.side.sequence import Part, SideSequence
from betoken.engine.batch import Segment


class ChainedMtpDrafter(ChainDrafter):
    """Hosts the layers for any number of sequences."""

    source = "mtp"

    def __init__(self, layers: Sequence[MtpForward], pages: SharedPages, vocab_size: int, max_rows: int) -> None:
        """Args:
        layers: in the order of the tokens that they predict, without heads; each has as many pages as `pages`.
        vocab_size, max_rows: see `SideDrafter`.
        """
        make_context = partial(LayerContext, num_ahead=len(layers) - 1)
        super().__init__(layers[0], pages, [0], max_rows, ChainedMtpSettings(), make_context)
        self._layers = layers
        self._chooser = Chooser(layers[0].target_ids, vocab_size)

    def _begin(self, owner: SideSequence, num_tokens: int) -> ParallelDraft | None:
        seq = owner.draft
        num_wanted = num_tokens if seq.terms is None else seq.terms.max_tokens
        num_wanted = min(num_wanted, owner.settings.max_depth, len(self._layers))
        if num_wanted < 1 or not owner.context.is_current:
            return None
        return ParallelDraft(owner, num_wanted, self._min_share(seq))

    def _draft(self, drafts: list[ParallelDraft], long: Sequence[SideSequence]) -> list[ParallelDraft]:
        begun: list[ParallelDraft] = []
        texts: list[_Rows] = []
        for owner, draft in [*((draft.owner, draft) for draft in drafts), *((owner, None) for owner in long)]:
            if not self._make_room(owner.context, owner.context.num_rows):
                owner.context.forget()
                continue
            texts.append(_Rows(owner.context, *owner.context.rows(), draft))
            if draft is not None:
                begun.append(draft)
        depths = iter(range(len(self._layers)))

        def score(rows: list[int], owners: list[int], previous: list[int]) -> tuple[Tensor, None]:
            depth = next(depths)
            self._take_in(depth, texts)
            states = torch.cat([texts[owner].hidden[-1:] for owner in owners])
            return self._layers[depth].scores(states), None

        choose_chains(begun, score, self._chooser, follows=True)
        for depth in depths:  # the KV of the rows is wanted, too, where fewer tokens are
            self._take_in(depth, texts)
        for text in texts:
            text.context.taken_in()
        return begun

    def _take_in(self, depth: int, texts: Sequence[_Rows]) -> None:
        """Run a layer over all rows whose tokens are known or drafted."""
        parts = [part for text in texts for part in text.parts(depth, self._max_rows)]
        if not parts:
            return
        (states,) = self._pass(parts, self._layers[depth])
        ends = list(accumulate(text.num_rows for text in texts))
        for text, end in zip(texts, ends, strict=True):
            text.hidden = states[end - text.num_rows : end]


@dataclass(slots=True, eq=False)
class _Rows:
    """New rows of a text, on their way through the layers."""

    context: LayerContext
    first: int
    """Slot of the first row."""
    ids: list[int]
    """Committed tokens of the rows."""
    hidden: Tensor
    """[R, H] states, then outputs of the last layer."""
    draft: ParallelDraft | None

    @property
    def num_rows(self) -> int:
        """Rows that the last layer took."""
        return len(self.hidden)

    def parts(self, depth: int, max_rows: int) -> list[Part]:
        """The rows of the layer of index `depth`, in parts that a pass holds."""
        ids = [*self.ids, *(self.draft.draft_ids if self.draft is not None else ())][depth:]
        ids, self.hidden = ids[: len(self.hidden)], self.hidden[: len(ids)]
        if self.draft is not None:
            self.draft.num_passes += 1
        parts = []
        for start in range(0, len(ids), max_rows):
            taken = ids[start : start + max_rows]
            segment = Segment(self.context.page_ids, self.first + start, taken, num_logits=len(taken))
            parts.append(Part(segment, self.hidden[start : start + max_rows]))
        return parts
