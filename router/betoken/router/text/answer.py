"""The growing answer of one request: which tokens count, which text may be released, and when it ends.

Applies end ids, stop strings and limits inside a verified block. Its text depends on the ids alone, whatever blocks
they came in, so that a resumed request continues the same text. Knows no worker and no stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from betoken.router.text.clean_up import CleaningDetokenizer
from betoken.router.text.detokenizer import Detokenizer
from betoken.router.text.stop_search import StopSearch


class FinishReason(Enum):
    """Why an answer ended."""

    STOP = "stop"
    """EOS, a stop id or a stop string."""
    LENGTH = "length"
    """max_new_tokens or the context's end."""


@dataclass(frozen=True, slots=True)
class StopRules:
    """The end of an answer."""

    end_ids: frozenset[int]
    """EOS (unless ignored) and stop ids; the answer ends with them."""
    stop_strings: tuple[str, ...]
    """The answer's text ends before the first of these."""
    min_new_tokens: int
    """Only the length ends the answer within its first tokens; stop strings must end after them."""
    max_new_tokens: int
    """Largest number of output tokens, the context's end included."""
    special_names: Mapping[int, str]
    """Special tokens by id: they leave no text, and a stop string may name them."""
    early_end_ids: frozenset[int] = frozenset()
    """End ids that end the answer within its first tokens too."""


class Kept(NamedTuple):
    """The part that a block added to an answer."""

    num_tokens: int
    """Leading tokens that count."""
    text: str
    """Text that became final."""
    num_chars: Sequence[int]
    """Characters of `text` that became final with each token."""
    num_held_chars: Sequence[int] = ()
    """For each special token the characters held back before it; empty without special tokens."""


NOTHING = Kept(0, "", ())


class Answer:
    """Output ids and text of one request."""

    def __init__(self, rules: StopRules, detokenizer: Detokenizer | CleaningDetokenizer) -> None:
        self._rules = rules
        self._detokenizer = detokenizer
        self._stops = StopSearch(rules.stop_strings, rules.special_names)
        self.output_ids: list[int] = []
        """All tokens that count, resumed ones included."""
        self.finish: FinishReason | None = None
        """Set once the answer has ended; nothing is appended then."""
        self.stop = ""
        """The stop string that ended it, or empty."""
        self._is_cut = False
        """Whether it ended within the text."""

    @property
    def room(self) -> int:
        """Tokens that may still be appended."""
        return self._rules.max_new_tokens - len(self.output_ids)

    def end_without_room(self) -> bool:
        """End an answer that may have no tokens; whether it has ended."""
        if self.room <= 0 and self.finish is None:
            self.finish = FinishReason.LENGTH
        return self.finish is not None

    def append(self, ids: Sequence[int]) -> Kept:
        """Append the target's next tokens. Ids beyond the answer's end are dropped, and their text with them."""
        if self.finish is not None:
            return NOTHING
        room = self.room
        ids = self._until_end(ids, room)
        if self._rules.stop_strings or not self._rules.special_names.keys().isdisjoint(ids):
            kept = self._search(ids)
        else:
            text, num_chars = self._detokenizer.step(ids)
            kept = Kept(len(ids), text, num_chars)
        self.output_ids += ids[: kept.num_tokens]
        if self.finish is None and kept.num_tokens >= room:
            self.finish = FinishReason.LENGTH
        if self.finish is None or not (rest := self._flush()):
            return kept
        num_chars = [*kept.num_chars[:-1], kept.num_chars[-1] + len(rest)]
        return kept._replace(text=kept.text + rest, num_chars=num_chars)

    def _flush(self) -> str:
        """Text still held back when the answer has ended, up to a stop string that shows only now; empty after one."""
        if self._is_cut:
            return ""
        text = self._detokenizer.flush()
        is_sought = len(self.output_ids) > self._rules.min_new_tokens
        match = self._stops.match(text) if is_sought else None
        if match is None:
            return self._stops.flush() + text
        self.finish, self.stop = FinishReason.STOP, match.stop
        return (self._stops.held + text)[: match.start]

    def _until_end(self, ids: Sequence[int], room: int) -> Sequence[int]:
        """`ids` up to the room left and to the first end id, that one included."""
        rules = self._rules
        if len(ids) > room:
            ids = ids[: max(0, room)]
        if rules.end_ids.isdisjoint(ids):
            return ids
        num_output = len(self.output_ids)
        for index, token_id in enumerate(ids):
            is_early = num_output + index < rules.min_new_tokens
            if token_id in (rules.early_end_ids if is_early else rules.end_ids):
                self.finish = FinishReason.STOP
                return ids[: index + 1]
        return ids

    def _search(self, ids: Sequence[int]) -> Kept:
        """Append `ids` one by one, up to the id that completes a stop string."""
        texts: list[str] = []
        num_held: list[int] = []
        num_output = len(self.output_ids)
        for index, token_id in enumerate(ids):
            is_special = token_id in self._rules.special_names
            num_held.append(len(self._stops.held) + self._detokenizer.num_held if is_special else 0)
            text, _ = self._detokenizer.step((token_id,))
            is_sought = num_output + index >= self._rules.min_new_tokens
            match = self._stops.match(text, token_id) if is_sought else None
            if match is not None:
                self.finish = FinishReason.STOP
                self.stop, self._is_cut = match.stop, True
                whole = self._stops.held + text
                # A special token may cut a character in half; its beginning came before the stop string.
                texts.append(whole[: match.start] if match.start < len(whole) else whole + self._detokenizer.flush())
                break
            texts.append(self._stops.feed(text, token_id))
        return Kept(len(texts), "".join(texts), [len(text) for text in texts], num_held if any(num_held) else ())
