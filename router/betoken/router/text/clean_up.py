"""Removes spaces before punctuation from a decoded text, complete or streamed, if the model's tokenizer does so.

Knows English contractions as transformers does; nothing of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from betoken.router.text.detokenizer import Detokenizer

_REPLACED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")),
    *((" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
_CHARACTERS = frozenset("".join(written for written, _ in _REPLACED))


def clean_up(text: str) -> str:
    """`text` without spaces before punctuation. Source: transformers, `clean_up_tokenization`."""
    for written, shown in _REPLACED:
        text = text.replace(written, shown)
    return text


class CleaningDetokenizer:
    """A detokenizer with cleaned-up text; text that later ids might change is held back."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return len(clean_up(self._held)) + self._detokenizer.num_held

    def step(self, ids: Sequence[int]) -> tuple[str, list[int]]:
        """Like `Detokenizer.step`."""
        texts = [self._feed(self._detokenizer.step((token_id,))[0]) for token_id in ids]
        return "".join(texts), [len(text) for text in texts]

    def flush(self) -> str:
        """Like `Detokenizer.flush`."""
        text, self._held = self._held + self._detokenizer.flush(), ""
        return clean_up(text)

    def _feed(self, text: str) -> str:
        self._held += text
        end = next((place for place in range(len(self._held), 0, -1) if _is_apart(self._held, place)), 0)
        text, self._held = self._held[:end], self._held[end:]
        return clean_up(text)


def _is_apart(text: str, place: int) -> bool:
    """Whether nothing that is replaced can reach across `place`, whatever follows `text`."""
    before = text[place - 1]
    if before not in _CHARACTERS:
        return True
    # A word begins, and not a quote, which may pull what follows to what came before.
    return before not in " '" and text[place : place + 1] == " " and text[place + 1 : place + 2] not in ("", "'")
