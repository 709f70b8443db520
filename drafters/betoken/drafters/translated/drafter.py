"""A drafter whose model has another tokenizer than the target, behind the target's ids.

Translated token by token (TLI), drafts are chains or trees of common tokens with the target's own noise. Translated as
text (SLEM) they are chains. Committed text that the draft model encodes otherwise than before is opened again there;
prefix caching finds the pages before the difference.
"""

from __future__ import annotations

import logging

from betoken.drafters.drafter import Drafted, Drafter, DraftSequence
from betoken.drafters.translated.sequence import TranslatedSequence
from betoken.drafters.translated.translation import Translation

logger = logging.getLogger(__name__)


class Translated:
    """Translates for a drafter that runs a `TranslatedRunner`. Its settings are that drafter's."""

    def __init__(self, inner: Drafter, translation: Translation) -> None:
        self.inner = inner
        self._translation = translation
        self._open: dict[DraftSequence, TranslatedSequence] = {}

    @property
    def mask_token_id(self) -> int | None:
        """Mask token of a PARD model in its own vocabulary; None without one."""
        mask: int | None = getattr(self.inner, "mask_token_id", None)
        return None if mask is None else self._translation.draft_id(mask)

    @property
    def has_work(self) -> bool:
        return self.inner.has_work

    def open(self, sequence: DraftSequence) -> None:
        self._open_as(sequence, self._translation.begin(sequence.ids))

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        own = self._open[sequence]
        num_replaced, tail = self._translation.follow(own.ids, ids)
        if num_replaced:
            self.inner.close(own)
            self._open_as(sequence, [*own.ids[: len(own.ids) - num_replaced], *tail])
        elif tail:
            own.commit(tail)
            self.inner.commit(own, tail)

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        own = self._open[sequence]
        own.is_waiting = True
        own.takes_trees = sequence.takes_trees and self._translation.is_by_token
        own.num_wanted = num_tokens
        self.inner.request(own, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        if (own := self._open.pop(sequence, None)) is not None:
            self.inner.close(own)

    def step(self) -> list[Drafted]:
        """Run a step of the inner drafter, which may finish drafts of another drafter that uses the same model."""
        return [self._translate(drafted) for drafted in self.inner.step()]

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def _open_as(self, sequence: DraftSequence, mixed_ids: list[int]) -> None:
        own = TranslatedSequence(sequence, mixed_ids, self._translation)
        self.inner.open(own)
        self._open[sequence] = own

    def _translate(self, drafted: Drafted) -> Drafted:
        own = drafted.sequence
        assert isinstance(own, TranslatedSequence), "only translated sequences are open in the inner drafter"
        own.is_waiting = False
        drafted.sequence = own.original
        if not self._translation.is_by_token:
            self._translate_text(drafted, own.num_wanted)
        return drafted

    def _translate_text(self, drafted: Drafted, num_tokens: int) -> None:
        """A failing translation costs one sequence its draft; a step has drafts of others too."""
        mixed_ids, drafted.draft_ids = drafted.draft_ids, []
        if drafted.sources is not None:
            drafted.sources = drafted.sources[-1:] or None  # tokens have no counterpart; the last is the model's
        try:
            drafted.draft_ids = self._translation.to_target(drafted.sequence.ids, mixed_ids)[:num_tokens]
        except Exception:
            logger.exception("a draft cannot be translated")
