"""A sequence in the mixed ids of a translation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from betoken.drafters.drafter import DraftSequence, TargetHistory
from betoken.drafters.translated.translation import Translation


class TranslatedSequence(DraftSequence):
    """Translation of a sequence for a draft model."""

    __slots__ = ("_translation", "num_wanted", "original")

    def __init__(self, original: DraftSequence, mixed_ids: Sequence[int], translation: Translation) -> None:
        """`mixed_ids`: translation of the committed text."""
        self.original = original
        self.num_wanted = 0
        """Most target ids of its draft."""
        self._translation = translation
        params = original.params
        if original.wants_probs and not translation.is_by_token:
            # Token probabilities do not add up to the probability of a text. A greedy draft is certain.
            params = dataclasses.replace(params, temperature=0.0)
        super().__init__(
            key=original.key,
            params=params,
            prompt_ids=tuple(mixed_ids),
            output_ids=[],
            max_length=original.max_length,
            settings=original.settings,
            deadline_s=original.deadline_s,
            wants_probs=original.wants_probs and translation.is_by_token,
            draft_affects_output=original.draft_affects_output,
            tenant=original.tenant,
            span=original.span,
        )

    def history(self, draft_ids: Sequence[int]) -> TargetHistory:
        """The original's text and rules, so that noise and logits processors are the target's."""
        return self.original.history(self._translation.history(draft_ids))
