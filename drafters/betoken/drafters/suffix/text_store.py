"""Documents of token ids of several owners, with an index of their n-grams; the oldest text makes room for new text.

All owners share a pool of pages. An owner that needs a page when none is free takes the oldest page of the owner with
the most pages, so that no owner can displace the text of another that holds less. Each owner has its own index.
Memory per token: 4 bytes for its id, 12 for the links between equal n-grams, and 1 to 48 for their heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from betoken.drafters.suffix.settings import MAX_MATCH

Ids: TypeAlias = npt.NDArray[np.uint32]
_Index: TypeAlias = npt.NDArray[np.int64]

NGRAM_SIZES = (12, 5, 2)
"""Sizes of the indexed n-grams, tokens, the largest first. The smallest is the shortest match."""
MAX_PLACES = 128
"""Most places of a match whose continuations are read, the most recent ones."""
BYTES_PER_TOKEN = 28  # usually
PAGE_TOKENS = 1024
MAX_ID = (1 << 31) - 1
_MAX_STEPS = 256
"""Most places of one n-gram that are considered, the most recent ones; other n-grams of its bucket count."""
_BLOCK_TOKENS = 64
"""Tokens of a block of a known text."""
_END = np.uint32(0xFFFFFFFF)
"""Follows each document."""
_FIRST_BUCKETS = 1024
_MAX_LOAD, _MIN_LOAD = 16, 0.25
"""Tokens per bucket above and below which the index of an owner is built again."""
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Match(NamedTuple):
    """Places of the longest end of a text that occurs in the documents of an owner."""

    length: int
    """Tokens, at most `MAX_MATCH`."""
    continuations: list[list[int]]
    """Ids that follow each place in its document, the most recent place first; at least one each."""


@dataclass(slots=True)
class _Document:
    begin: int
    """Position of its first id."""
    end: int
    """Position after its end mark."""
    blocks: list[int]
    """Known blocks that end with this document."""


@dataclass(slots=True, eq=False)
class _Owner:
    """Text and index of one owner. Positions count its tokens from 0, and never restart."""

    number: int
    pages: list[int] = field(default_factory=list)
    table: _Index = field(default_factory=lambda: np.zeros(0, np.int64))
    """The pages again, for many positions at once."""
    first_page: int = 0
    """Number of pages that it has given up: its text starts with that page."""
    end: int = 0
    """Position after its last token."""
    documents: deque[_Document] = field(default_factory=deque)
    blocks: set[int] = field(default_factory=set)
    """Hashes of blocks with all text before them."""
    heads: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[buckets] per size: 1 + slot of the last place of the bucket's n-grams, 0 = none."""
    views: list[Any] = field(default_factory=list)
    """Memory views of `heads`, which are faster for single reads."""
    used: int = 0
    """Time of its last use, in uses of the store."""

    @property
    def start(self) -> int:
        """Position of its first token that is still held."""
        return self.first_page * PAGE_TOKENS


class TextStore:
    """A pool for so many tokens. Owners are any bytes; the oldest document of one may be cut after an eviction."""

    def __init__(self, num_tokens: int) -> None:
        """`num_tokens` is rounded up to pages, two at least."""
        num_pages = max(2, -(-num_tokens // PAGE_TOKENS))
        num_slots = num_pages * PAGE_TOKENS
        self._ids = np.zeros(num_slots, np.uint32)
        self._links = [np.zeros(num_slots, np.int32) for _ in NGRAM_SIZES]
        """Per size: 1 + slot of the place before in the same bucket, 0 = none."""
        self._link_views = [memoryview(links.data) for links in self._links]
        self._owner_of = [-1] * num_pages
        self._base_of = [0] * num_pages
        """Position of the first token of each page."""
        self._free = list(range(num_pages))[::-1]
        self._owners: dict[bytes, _Owner] = {}
        self._num_owners = self._num_uses = 0
        self.num_documents = self.num_tokens = 0
        """Held now; the end of a document counts as a token."""
        self.num_evicted = 0
        """Documents evicted so far."""

    @property
    def owners(self) -> list[bytes]:
        """Owners with text, the least recently used first."""
        return sorted(self._owners, key=lambda name: self._owners[name].used)

    def documents(self, name: bytes) -> Iterator[Ids]:
        """Yield the stored part of each document of an owner, the oldest first."""
        if (owner := self._owners.get(name)) is not None:
            for document in owner.documents:
                begin = max(document.begin, owner.start)
                yield self._ids[self._slots(owner, np.arange(begin, document.end - 1))]

    def add(self, name: bytes, ids: Sequence[int] | Ids, num_known: int = 0) -> None:
        """Add a document; one without an n-gram and its continuation is ignored.

        Args:
            num_known: leading ids that may be stored already, such as a conversation in its next prompt. The stored
                ones are not stored again.
        """
        text = np.asarray(ids, np.uint32)
        owner = self._used(name) or self._new(name)
        blocks = _blocks(text)
        num_held = self._num_held(owner, blocks, min(num_known, len(text)))
        if num_held < len(text):
            self._append(owner, text[max(0, num_held - MAX_MATCH) :], blocks)
        if not owner.documents:
            del self._owners[name]

    def find(self, name: bytes, tail: Sequence[int], depth: int) -> Match | None:
        """The longest match of the last ids of `tail`, with at most `depth` ids after each place; None without one."""
        owner = self._used(name)
        if owner is None:
            return None
        longest = MAX_MATCH
        for level, size in enumerate(NGRAM_SIZES):
            if len(tail) >= size and (places := self._places(owner, level, tail[-size:])):
                positions = np.array(places)
                lengths = self._match_lengths(owner, positions, np.array(tail[: -longest - 1 : -1], np.uint32))
                if (length := int(lengths.max())) >= size:
                    return Match(length, self._continuations(owner, positions[lengths == length], depth))
            longest = size - 1
        return None

    def check_integrity(self) -> None:
        """Derive the accounting again; raises RuntimeError if it is wrong."""
        held = sorted([*self._free, *(page for owner in self._owners.values() for page in owner.pages)])
        if held != list(range(len(self._owner_of))):
            raise RuntimeError("pages are lost, or held twice")
        if self.num_tokens != sum(owner.end - owner.start for owner in self._owners.values()):
            raise RuntimeError(f"{self.num_tokens} tokens are not what the owners hold")
        for owner in self._owners.values():
            if -(-owner.end // PAGE_TOKENS) - owner.first_page != len(owner.pages):
                raise RuntimeError(f"{len(owner.pages)} pages for the positions {owner.start} to {owner.end}")

    def _used(self, name: bytes) -> _Owner | None:
        self._num_uses += 1
        if (owner := self._owners.get(name)) is not None:
            owner.used = self._num_uses
        return owner

    def _new(self, name: bytes) -> _Owner:
        owner = self._owners[name] = _Owner(self._num_owners, used=self._num_uses)
        self._num_owners += 1
        self._clear_index(owner, _FIRST_BUCKETS)
        return owner

    @staticmethod
    def _num_held(owner: _Owner, blocks: list[int], num_known: int) -> int:
        """Leading ids that are stored already, in whole blocks."""
        num_blocks = 0
        while (num_blocks + 1) * _BLOCK_TOKENS <= num_known and blocks[num_blocks] in owner.blocks:
            num_blocks += 1
        return num_blocks * _BLOCK_TOKENS

    def _append(self, owner: _Owner, text: Ids, blocks: list[int]) -> None:
        if len(text) <= NGRAM_SIZES[-1]:
            return
        ids = np.append(text[-(len(self._ids) - 1) :], _END)
        begin = owner.end
        new_blocks = [block for block in blocks if block not in owner.blocks]
        owner.blocks.update(new_blocks)
        owner.documents.append(_Document(begin, begin + len(ids), new_blocks))
        self.num_documents += 1
        self.num_tokens += len(ids)
        while len(ids):
            room = -owner.end % PAGE_TOKENS
            if not room:
                self._take_page(owner)
                room = PAGE_TOKENS
            slot = owner.pages[-1] * PAGE_TOKENS + owner.end % PAGE_TOKENS
            part, ids = ids[:room], ids[room:]
            self._ids[slot : slot + len(part)] = part
            owner.end += len(part)
        if self._fits(owner):
            self._index(owner, max(begin, owner.start))
        else:
            self._index_again(owner)

    def _take_page(self, owner: _Owner) -> None:
        """Give the owner a page at its end."""
        if not self._free:
            most = max(len(each.pages) for each in self._owners.values())
            if len(owner.pages) == most:
                self._evict_page(owner)
            else:
                rich = [(each.used, name) for name, each in self._owners.items() if len(each.pages) == most]
                self._shorten(min(rich)[1])
        page = self._free.pop()
        self._owner_of[page], self._base_of[page] = owner.number, owner.end
        owner.pages.append(page)
        owner.table = np.array(owner.pages)

    def _shorten(self, name: bytes) -> None:
        """Evict the oldest page of an owner."""
        owner = self._owners[name]
        self._evict_page(owner)
        if not owner.documents:
            del self._owners[name]
        elif not self._fits(owner):
            self._index_again(owner)

    def _evict_page(self, owner: _Owner) -> None:
        page = owner.pages.pop(0)
        owner.table = owner.table[1:]
        self._owner_of[page] = -1
        self._free.append(page)
        self.num_tokens -= min(PAGE_TOKENS, owner.end - owner.start)
        owner.first_page += 1
        for document in owner.documents:
            if document.begin >= owner.start:
                break
            owner.blocks.difference_update(document.blocks)  # cut texts are stored again
            document.blocks.clear()
        while owner.documents and owner.documents[0].end <= owner.start:
            owner.documents.popleft()
            self.num_documents -= 1
            self.num_evicted += 1

    @staticmethod
    def _fits(owner: _Owner) -> bool:
        """Whether the index has the size for the text."""
        num_tokens, num_buckets = owner.end - owner.start, len(owner.heads[0])
        is_large = num_buckets > _FIRST_BUCKETS and num_tokens < _MIN_LOAD * num_buckets
        return not is_large and num_tokens <= _MAX_LOAD * num_buckets

    def _index_again(self, owner: _Owner) -> None:
        self._clear_index(owner, max(_FIRST_BUCKETS, owner.end - owner.start))
        self._index(owner, max(owner.start, owner.documents[0].begin))

    @staticmethod
    def _clear_index(owner: _Owner, num_buckets: int) -> None:
        owner.heads = [np.zeros(num_buckets, np.int32) for _ in NGRAM_SIZES]
        owner.views = [memoryview(heads.data) for heads in owner.heads]

    def _index(self, owner: _Owner, first: int) -> None:
        """Add the n-grams of the documents from position `first` on, which begins a document or what is left of one."""
        slots = self._slots(owner, np.arange(first, owner.end))
        ids = self._ids[slots]
        places = np.arange(len(ids))
        ends = np.maximum.accumulate(np.where(ids == _END, places, -1))
        room = places - 1 - np.append(-1, ends[:-1])  # ids of the same document before each place
        for level, size in enumerate(NGRAM_SIZES):
            buckets = _hashes(ids, size) % np.uint64(len(owner.heads[level]))
            known = np.flatnonzero((room >= size) & (ids != _END))
            self._link(owner, level, buckets[known - size].astype(np.int64), slots[known])

    def _link(self, owner: _Owner, level: int, buckets: _Index, slots: _Index) -> None:
        """Put places, in the order of their positions, in front of their buckets' chains."""
        if not len(slots):
            return
        heads, links = owner.heads[level], self._links[level]
        ordered = np.sort(buckets << 32 | np.arange(len(buckets)))  # by position within a bucket
        buckets, slots = ordered >> 32, slots[ordered & 0xFFFFFFFF]
        is_first = np.append(True, buckets[1:] != buckets[:-1])
        before = np.append(0, slots[:-1] + 1)
        links[slots] = np.where(is_first, heads[buckets], before)
        is_last = np.append(is_first[1:], True)
        heads[buckets[is_last]] = slots[is_last] + 1

    def _places(self, owner: _Owner, level: int, ngram: Sequence[int]) -> list[int]:
        """Positions after the n-gram, and perhaps after others, the most recent first."""
        heads, links = owner.views[level], self._link_views[level]
        owner_of, base_of, number = self._owner_of, self._base_of, owner.number
        slot = heads[_hash(ngram) % len(heads)] - 1
        positions: list[int] = []
        last = owner.end
        for _ in range(_MAX_STEPS):
            if slot < 0 or owner_of[slot // PAGE_TOKENS] != number:
                break
            position = base_of[slot // PAGE_TOKENS] + slot % PAGE_TOKENS
            if position >= last:  # its page was evicted and holds newer text: what comes before is evicted, too
                break
            positions.append(position)
            last = position
            slot = links[slot] - 1
        return positions

    def _match_lengths(self, owner: _Owner, positions: _Index, backwards: Ids) -> _Index:
        """Ids before each position that equal `backwards`, up to the first that differs."""
        before = positions[:, None] - np.arange(1, len(backwards) + 1)
        equal = self._ids[self._slots(owner, np.maximum(before, owner.start))] == backwards
        equal &= before >= owner.start
        return np.where(equal.all(1), len(backwards), equal.argmin(1))

    def _continuations(self, owner: _Owner, positions: _Index, depth: int) -> list[list[int]]:
        after = positions[:MAX_PLACES, None] + np.arange(depth)
        rows = self._ids[self._slots(owner, np.minimum(after, owner.end - 1))]
        lengths = np.where((rows == _END).any(1), (rows == _END).argmax(1), depth)
        return [row[:length] for row, length in zip(rows.tolist(), lengths.tolist(), strict=True)]

    @staticmethod
    def _slots(owner: _Owner, positions: _Index) -> _Index:
        return owner.table[positions // PAGE_TOKENS - owner.first_page] * PAGE_TOKENS + positions % PAGE_TOKENS


def _blocks(text: Ids) -> list[int]:
    """Hashes of the whole blocks of a text, each with all that precedes it."""
    data, size, before = text.tobytes(), _BLOCK_TOKENS * text.itemsize, 0
    hashes = []
    for end in range(size, len(data) + 1, size):
        before = hash((before, data[end - size : end]))
        hashes.append(before)
    return hashes


def _hashes(ids: Ids, size: int) -> npt.NDArray[np.uint64]:
    """Hash of the n-gram at each index, as `_hash`; empty if there is none."""
    num_ngrams = max(0, len(ids) - size + 1)
    wide, hashes = ids.astype(np.uint64), np.zeros(num_ngrams, np.uint64)
    for offset in range(size):
        hashes = (hashes + wide[offset : offset + num_ngrams] + np.uint64(1)) * np.uint64(_MULTIPLIER)
    return hashes >> np.uint64(32)


def _hash(ngram: Sequence[int]) -> int:
    hashed = 0
    for token_id in ngram:
        hashed = (hashed + token_id + 1) * _MULTIPLIER & _MASK
    return hashed >> 32
