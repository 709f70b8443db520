"""Translation between a draft model's tokens and the target's, by the bytes that tokens stand for.

A translated sequence holds *mixed* ids: the target's id of a draft token that both vocabularies have, and for the other
draft tokens their own id plus the size of the target's vocabulary. So noise and logits processors of the target apply
to a draft model's choice unchanged. Knows no sequences and no tensors.
Source: token-level intersection (TLI) and string-level exact match (SLEM), Timor et al., arXiv:2502.05202.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

from betoken.drafters.translated.alignment import Alignment, align
from betoken.drafters.translated.sample import SAMPLE
from betoken.drafters.translated.vocabulary import Vocabulary, incomplete_suffix

MIN_COVERAGE = 0.9
"""Least share of the target's tokens of a text that both vocabularies must have for token-level translation."""
LOOKBEHIND = 10
"""Tokens before a seam that are encoded again."""
NONE = -1
"""Entry of a map for a token that the other vocabulary lacks."""


class Translation:
    """Two vocabularies and the map between them."""

    def __init__(
        self, target: Vocabulary, draft: Vocabulary, num_draft_ids: int, is_by_token: bool | None = None
    ) -> None:
        """Args:
        num_draft_ids: rows of the draft model's output layer, padding included.
        is_by_token: None = decided by the coverage of a sample.
        """
        self.target = target
        self.draft = draft
        self.num_draft_ids = num_draft_ids
        self.target_ids = [NONE] * num_draft_ids
        """Target id of each draft id."""
        self.draft_ids = [NONE] * target.size
        """Draft id of each target id. Several target ids may have one."""
        self._map_tokens()
        self.coverage = self._coverage(SAMPLE.encode())
        """Share of the target's tokens of a sample that the draft model has."""
        self.is_by_token = self.coverage >= MIN_COVERAGE if is_by_token is None else is_by_token
        """Whether drafts consist of common tokens only (TLI). Otherwise their text is encoded again (SLEM)."""

    @property
    def num_ids(self) -> int:
        """Number of mixed ids."""
        return self.target.size + self.num_draft_ids

    @property
    def num_choices(self) -> int:
        """Mixed ids below this number may be drafted."""
        return self.target.size if self.is_by_token else self.num_ids

    @cached_property
    def reproduces_text(self) -> bool:
        """Whether the ids of a sample, in both vocabularies, stand for that sample."""
        text = SAMPLE.encode()
        return self.target.reproduces(text) and self.draft.reproduces(text)

    def mixed_id(self, draft_id: int) -> int:
        """Return the mixed id of a draft id."""
        target_id = self.target_ids[draft_id]
        return self.target.size + draft_id if target_id == NONE else target_id

    def draft_id(self, mixed_id: int) -> int:
        """Return the draft id of a mixed id; 0 for a target id without one, which no draft contains."""
        if mixed_id >= self.target.size:
            return mixed_id - self.target.size
        return max(0, self.draft_ids[mixed_id])

    def begin(self, target_ids: Sequence[int]) -> list[int]:
        """Return the mixed ids of a whole text, at least one."""
        ids, first = self._encode_mixed(target_ids), [self.mixed_id(each) for each in self.draft.beginning]
        ids = ids if ids[: len(first)] == first else [*first, *ids]
        return ids or [self.mixed_id(self.draft.ids_of_bytes.get(b"\n", 0))]

    def follow(self, mixed_ids: Sequence[int], target_ids: Sequence[int]) -> Alignment:
        """Return how the mixed ids of a text change when `target_ids` are appended to the text."""
        if self.is_by_token:
            return Alignment(0, self._follow_by_token(target_ids))
        if any(token_id >= self.target.size or token_id in self.target.special_names for token_id in target_ids):
            return Alignment(0, self._encode_mixed(target_ids))
        window = self._window([self.draft_id(each) for each in mixed_ids[-LOOKBEHIND:]], self.draft)
        added = self.target.decode(target_ids)
        found = _reencode(window, added, self.draft)
        if found is None:
            found = Alignment(0, self.draft.encode(added))
        return Alignment(found.num_replaced, [self.mixed_id(each) for each in found.tail])

    def history(self, mixed_ids: Sequence[int]) -> list[int]:
        """Return the target ids of drafted mixed ids, token by token."""
        ids: list[int] = []
        for mixed_id in mixed_ids:
            ids += [mixed_id] if mixed_id < self.target.size else self._spell(mixed_id - self.target.size)
        return ids

    def to_target(self, committed_ids: Sequence[int], mixed_ids: Sequence[int]) -> list[int]:
        """Return the target's encoding of drafted mixed ids.

        `committed_ids`: end of the committed text, target ids. An incomplete character at the end of the draft is left
        out. The draft ends before a special token that the target lacks, and after any other special token.
        """
        text, end = self._text(mixed_ids)
        text = text[: len(text) - incomplete_suffix(text)] if not end else text
        ids = self.target.encode(text)
        known = [each for each in committed_ids[-LOOKBEHIND:] if each < self.target.size]
        found = _reencode(self._window(known, self.target), text, self.target)
        if found is not None and not found.num_replaced:
            ids = found.tail
        return [*ids, *end]

    def _map_tokens(self) -> None:
        for token, draft_id in self.draft.ids_of_bytes.items():
            if draft_id < self.num_draft_ids and (target_id := self.target.ids_of_bytes.get(token)) is not None:
                self.target_ids[draft_id] = target_id
        special = {name: draft_id for draft_id, name in self.draft.special_names.items()}
        for target_id, name in self.target.special_names.items():
            draft_id = special.get(name, self.num_draft_ids)
            if draft_id < self.num_draft_ids:
                self.target_ids[draft_id], self.draft_ids[target_id] = target_id, draft_id
        for target_id, token in enumerate(self.target.token_bytes):
            draft_id = self.draft.ids_of_bytes.get(token, self.num_draft_ids)
            if draft_id < self.num_draft_ids and target_id not in self.target.special_names:
                self.draft_ids[target_id] = draft_id

    def _coverage(self, text: bytes) -> float:
        ids = self.target.encode(text)
        return sum(self.draft_ids[each] != NONE for each in ids) / len(ids) if ids else 0.0

    def _follow_by_token(self, target_ids: Sequence[int]) -> list[int]:
        """Mixed ids of target ids, each alone; the ids of tokens that the draft model lacks are encoded together."""
        ids: list[int] = []
        unknown: list[int] = []
        for target_id in target_ids:
            draft_id = self.draft_ids[target_id] if target_id < self.target.size else NONE
            if draft_id == NONE:
                unknown.append(target_id)
                continue
            ids += [*self._encode_mixed(unknown), self.mixed_id(draft_id)]
            unknown = []
        return ids + self._encode_mixed(unknown)

    def _encode_mixed(self, target_ids: Sequence[int]) -> list[int]:
        """Mixed ids of the text of target ids; special tokens that the draft model lacks are left out."""
        ids: list[int] = []
        text = b""
        for part in self._parts(target_ids):
            if isinstance(part, bytes):
                text += part
                continue
            ids += [*map(self.mixed_id, self.draft.encode(text))]
            text = b""
            ids += [] if self.draft_ids[part] == NONE else [self.mixed_id(self.draft_ids[part])]
        return ids + [*map(self.mixed_id, self.draft.encode(text))]

    def _parts(self, target_ids: Sequence[int]) -> Iterator[bytes | int]:
        """Text between special tokens, and their ids. Padding ids stand for nothing."""
        run: list[int] = []
        for target_id in target_ids:
            if target_id in self.target.special_names:
                yield self.target.decode(run)
                yield target_id
                run = []
            elif target_id < self.target.size:
                run.append(target_id)
        yield self.target.decode(run)

    def _text(self, mixed_ids: Sequence[int]) -> tuple[bytes, list[int]]:
        """Text of drafted ids, and the special token of the target that ends it, if any."""
        text = b""
        for draft_id in map(self.draft_id, mixed_ids):
            if draft_id >= self.draft.size:
                break
            if draft_id in self.draft.special_names:
                end = self.target_ids[draft_id]
                return text, [] if end == NONE else [end]
            text += self.draft.token_bytes[draft_id]
        return text, []

    def _spell(self, draft_id: int) -> list[int]:
        token = self.draft.token_bytes[draft_id] if draft_id < self.draft.size else b""
        return [] if draft_id in self.draft.special_names else self.target.encode(token)

    @staticmethod
    def _window(ids: Sequence[int], vocabulary: Vocabulary) -> list[int]:
        """The ids after the last special token or padding."""
        for place in range(len(ids), 0, -1):
            if ids[place - 1] >= vocabulary.size or ids[place - 1] in vocabulary.special_names:
                return list(ids[place:])
        return list(ids)


def _reencode(window: Sequence[int], added: bytes, vocabulary: Vocabulary) -> Alignment | None:
    """Encode the text of `window` and what is added to it again; None if the new ids do not stand for that text.

    Without a common id all ids of the window are replaced.
    """
    text = vocabulary.decode(window)
    encoded = vocabulary.encode(text + added)
    found = align(window, encoded) or Alignment(len(window), encoded)
    kept = window[: len(window) - found.num_replaced]
    return found if vocabulary.decode([*kept, *found.tail]) == text + added else None
