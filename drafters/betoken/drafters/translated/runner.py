"""A draft model whose ids are mixed ids: rows of logits have the target's ids first."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from betoken.drafters.translated.translation import NONE, Translation
from betoken.engine.batch import Segment
from betoken.engine.forward import StepOutput
from betoken.engine.runner import ModelRunner


class TranslatedRunner(ModelRunner):
    """Runs the model of another runner, with its pages."""

    def __init__(self, runner: ModelRunner, translation: Translation) -> None:
        mask = runner.info.mask_token_id
        mixed_mask = None if mask is None else translation.mixed_id(mask)
        info = dataclasses.replace(runner.info, vocab_size=translation.num_ids, mask_token_id=mixed_mask)
        super().__init__(info, runner.page_table, runner.forward_of_model, runner.max_num_batched_tokens)
        self._runner = runner
        self._translation = translation
        kept = [each for each in range(translation.num_draft_ids) if self._is_choice(each)]
        self._draft_ids = torch.tensor(kept)
        self._mixed_ids = torch.tensor([translation.mixed_id(each) for each in kept])

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> StepOutput:
        """See `ModelRunner.forward`. The logits [R, V] have -inf for ids that the model lacks."""
        draft_id = self._translation.draft_id
        own = [dataclasses.replace(segment, ids=[*map(draft_id, segment.ids)]) for segment in segments]
        logits = self._runner.forward(own).logits
        if self._draft_ids.device != logits.device:
            self._draft_ids = self._draft_ids.to(logits.device)
            self._mixed_ids = self._mixed_ids.to(logits.device)
        mixed = logits.new_full((logits.shape[0], self._translation.num_choices), -math.inf)
        return StepOutput(mixed.index_copy_(1, self._mixed_ids, logits.index_select(1, self._draft_ids)))

    def _is_choice(self, draft_id: int) -> bool:
        return not self._translation.is_by_token or self._translation.target_ids[draft_id] != NONE
