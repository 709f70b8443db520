"""Fill-in-the-middle: a gap between two texts as ids, in the layout of the model's own tokens.

Sources: the technical reports of Qwen2.5-Coder, StarCoder 2 and Seed-Coder, Code Llama's `infilling_prompt_tokens`,
mistral-common's `encode_fim`, the model cards of SantaCoder, DeepSeek-Coder, CodeGemma and Granite. Names of
repositories and files, and the layout of files without tokens for them, follow llama.cpp's server.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import takewhile
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from betoken.v1.generation_pb2 import Infill, InfillFile

_REPOSITORY, _FILE = "myproject", "filename"
_SNIPPET = "\n\n--- snippet ---\n\n"
_TAILS = (16, 8, 4)
"""Numbers of tokens at the end of a prefix that are searched for elsewhere in the prompt."""
_MAX_PREDICTED = 1024
_ID_BYTES = 4

Encode = Callable[[str], Sequence[int]]


class _Names(NamedTuple):
    """Tokens of a model family."""

    prefix: str
    suffix: str
    middle: str = ""
    repository: str = ""
    file: str = ""
    ends: tuple[str, ...] = ()
    """Further tokens that end an answer."""
    is_suffix_first: bool = False
    file_follows_prefix: bool = False
    """Whether the name of the file with the gap follows the prefix token, and no line end the repository's name."""


_FAMILIES = (
    _Names(  # Qwen2.5-Coder, CodeGemma, Granite 3.3 and later
        *("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"),
        ends=("<|fim_pad|>", "<|file_separator|>", "<|filename|>", "<|reponame|>"),
    ),
    _Names(  # StarCoder and StarCoder 2, Granite Code
        *("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<repo_name>", "<file_sep>"),
        ends=("<fim_pad>", "<filename>", "<reponame>"),
        file_follows_prefix=True,
    ),
    _Names("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=("<fim-pad>",)),  # SantaCoder
    _Names("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>", ends=("\u2581<EOT>",)),  # Code Llama
    _Names("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    _Names("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True),  # Seed-Coder
    _Names("[PREFIX]", "[SUFFIX]", is_suffix_first=True),  # Codestral
)


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """Fill-in-the-middle tokens of a tokenizer, and their layout."""

    prefix_id: int
    suffix_id: int
    middle_id: int | None
    repository_id: int | None
    file_id: int | None
    end_ids: tuple[int, ...]
    """Ids that end an answer, in addition to EOS."""
    is_suffix_first: bool
    file_follows_prefix: bool

    @classmethod
    def of(cls, fast: FastTokenizer, given: Mapping[str, str]) -> InfillFormat | None:
        """Return the format of a tokenizer, None without such tokens; its tokens become special ones of `fast`, which
        leave no text.

        `given`: tokens by the fields of the family, if the model's file names them.
        """
        family = _family(fast, given)
        if family is None:
            return None
        names = [family.prefix, family.suffix, family.middle, family.repository, family.file, *family.ends]
        known = {name: token_id for name in names if (token_id := fast.token_to_id(name)) is not None}
        flags = {token.content: token for token in fast.get_added_tokens_decoder().values()}
        for name in known:
            token = flags.get(name, AddedToken(name, normalized=False))
            token.special = True
            fast.add_tokens([token])
        return cls(
            known[family.prefix],
            known[family.suffix],
            known.get(family.middle),
            known.get(family.repository),
            known.get(family.file),
            tuple(known.values()),
            family.is_suffix_first,
            family.file_follows_prefix,
        )

    @property
    def layout(self) -> tuple[object, ...]:
        """All that ids and ends depend on."""
        return astuple(self)

    def prompt(
        self, given: Infill, encode: Encode, encode_joined: Encode, bos_ids: Sequence[int], room: int
    ) -> list[int]:
        """Return the ids of a gap, at most `room` unless its tokens alone are more.

        `encode_joined` encodes without the blank that some tokenizers put before a text; `bos_ids` begin every prompt.
        """
        prefix, suffix = encode(given.prefix), encode_joined(given.suffix)
        files = [self._file(file, encode) for file in given.files]
        begin, here, inside = self._headers(encode) if files else ([], [], [])
        marks = 2 + (self.middle_id is not None)
        room = max(0, room - len(bos_ids) - len(begin) - len(here) - len(inside) - marks)
        num_suffix = min(len(suffix), max(room // 4, room - len(prefix)))
        num_prefix = min(len(prefix), room - num_suffix)
        files = _last_that_fit(files, room - num_suffix - num_prefix)
        before = [self.prefix_id, *inside, *prefix[len(prefix) - num_prefix :]]
        after = [self.suffix_id, *suffix[:num_suffix]]
        gap = after + before if self.is_suffix_first else before + after
        middle = [] if self.middle_id is None else [self.middle_id]
        return [*bos_ids, *begin, *(token_id for ids in files for token_id in ids), *here, *gap, *middle]

    def is_in(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt has a gap."""
        return self.prefix_id in prompt_ids and self.suffix_id in prompt_ids

    def predicted(self, prompt_ids: Sequence[int]) -> Sequence[int]:
        """Return the ids that follow the end of the prefix elsewhere in the prompt, for example in an older version of
        the file; empty if it is not repeated.

        The suffix is not predicted as a whole: it follows the answer, and n-gram drafts find its repeated parts.
        """
        ids = array("I", prompt_ids)
        start = ids.index(self.prefix_id) + 1
        end = next((at for at in range(start, len(ids)) if ids[at] in (self.suffix_id, self.middle_id)), len(ids))
        marks = set(self.end_ids)
        for length in _TAILS:
            if end - start >= length and (at := _repeated(ids, end - length, end)) is not None:
                following = ids[at : min(at + _MAX_PREDICTED, len(ids))]
                return array("I", takewhile(lambda token_id: token_id not in marks, following))
        return ()

    def _headers(self, encode: Encode) -> tuple[list[int], list[int], list[int]]:
        """Ids before the files, before the gap's file, and after its prefix token."""
        if self.file_id is None:
            return [], [], []
        line_end = "" if self.file_follows_prefix else "\n"
        begin = [] if self.repository_id is None else [self.repository_id, *encode(_REPOSITORY + line_end)]
        name = list(encode(f"{_FILE}\n"))
        return (begin, [self.file_id], name) if self.file_follows_prefix else (begin, [self.file_id, *name], [])

    def _file(self, file: InfillFile, encode: Encode) -> list[int]:
        header = encode(_SNIPPET) if self.file_id is None else [self.file_id, *encode(f"{file.name or _FILE}\n")]
        return [*header, *encode(file.text)]


def _family(fast: FastTokenizer, given: Mapping[str, str]) -> _Names | None:
    """The given tokens, completed by the tokens of their family; else the first family that the tokenizer knows."""
    known = {family.prefix: family for family in _FAMILIES}
    if {"prefix", "suffix", "middle"} <= given.keys():
        family = known.get(given["prefix"]) or _Names("", "")
        ends = (*family.ends, given["pad"]) if "pad" in given else family.ends
        named: dict[str, Any] = {name: token for name, token in given.items() if name != "pad"}
        return family._replace(**named, ends=ends)
    for family in _FAMILIES:
        if all(fast.token_to_id(name) is not None for name in family[:3] if name):
            return family
    return None


def _last_that_fit(files: Sequence[list[int]], room: int) -> list[list[int]]:
    kept: list[list[int]] = []
    for ids in reversed(files):
        room -= len(ids)
        if room < 0:
            break
        kept.append(ids)
    return kept[::-1]


def _repeated(ids: array[int], start: int, end: int) -> int | None:
    """End of the nearest other occurrence of ids[start:end]: the last before it, else the first after it."""
    data, tail = ids.tobytes(), ids[start:end].tobytes()
    at = data.rfind(tail, 0, (end - 1) * _ID_BYTES)
    while at >= 0 and at % _ID_BYTES:
        at = data.rfind(tail, 0, at + len(tail) - 1)
    if at < 0:
        at = data.find(tail, end * _ID_BYTES)
        while at >= 0 and at % _ID_BYTES:
            at = data.find(tail, at + 1)
    return None if at < 0 else at // _ID_BYTES + end - start


def has_blank_prefix(data: Mapping[str, object]) -> bool:
    """Whether the tokenizer of a tokenizer.json puts a blank before every text."""
    steps = json.dumps([data.get("normalizer"), data.get("pre_tokenizer")])
    return '"Prepend"' in steps or ('"Metaspace"' in steps and '"never"' not in steps)
