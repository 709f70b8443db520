"""The tokenizer in a GGUF file, as the text of a `tokenizer.json`: what routers and workers both make ids of.

It knows the byte-level and the sentencepiece vocabularies, and how llama.cpp names the ways to split a text. A way that
is not in the table is rejected: ids would differ silently.
"""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betoken.common.gguf.end_tokens import end_tokens
from betoken.common.gguf.header import GgufError, GgufHeader

_KEY = "tokenizer.ggml"
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLITS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "smaug-bpe", "dbrx"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2),
    "lfm2": _LLAMA3,
    **dict.fromkeys(("gpt-4o", "minimax-m2"), _GPT4O),
    "qwen35": _QWEN35,
    "tekken": _TEKKEN,
}
"""Pre-tokenizers by `tokenizer.ggml.pre`, applied before byte encoding."""
_WITH_GPT2_SPLIT = ("gpt-2", "olmo", "jais", "mpt", "phi-2", "trillion")
_WITH_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")

_WITH_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "lfm2", "tekken")
"""A word that is a token is one, whatever merges say."""
_WITH_BOS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2", "tekken")
"""Texts begin with BOS in files that do not say whether (llama.cpp's llama-vocab.cpp, `add_bos`)."""
_GEMMA = ("gemma2", "gemma3")
"""Architectures whose merges follow the tokens' places, not their scores, and whose runs of blanks are tokens."""
_BLANK = "\u2581"


@dataclass(frozen=True, slots=True)
class GgufTokenizer:
    """The content of a directory's tokenizer files."""

    text: str
    """Content of `tokenizer.json`."""
    config: Mapping[str, Any]
    """Content of `tokenizer_config.json`: the named tokens."""
    chat_template: str | None
    fim_tokens: Mapping[str, str]
    """Fill-in-the-middle tokens that the file names, by their role: prefix, suffix, middle, pad, repository, file."""


def read_tokenizer(header: GgufHeader) -> GgufTokenizer:
    """The tokenizer of a file.

    Raises:
        GgufError: it has none, or one of a kind that is not supported.
    """
    given = _Fields(header)
    model = given.text("model")
    if model == "gpt2":
        parts = _byte_level(given)
    elif model == "llama":
        parts = _sentencepiece(given)
    else:
        raise GgufError(f"{header.path}: {_KEY}.model = {model!r} is neither 'gpt2' nor 'llama'")
    parts |= {"version": "1.0", "truncation": None, "padding": None}
    parts["added_tokens"] = _added_tokens(given, end_tokens(header))
    if given.flag("add_bos_token", given.begins_with_bos(model)):
        parts["post_processor"] = _begin_with(given.token("bos_token_id"), given.number("bos_token_id"))
    if given.flag("add_eos_token", False):
        raise GgufError(f"{header.path}: {_KEY}.add_eos_token = true: prompts would end before they go on")
    names = {f"{name}_token": key for name, key in _NAMED.items() if header.metadata.get(f"{_KEY}.{key}") is not None}
    template = header.metadata.get("tokenizer.chat_template")
    return GgufTokenizer(
        json.dumps(parts, ensure_ascii=False),
        {name: given.token(key) for name, key in names.items()},
        template if isinstance(template, str) else None,
        {role: given.token(key) for role, keys in _FIM.items() for key in keys[::-1] if given.has(key)},
    )


_FIM = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "repository": ("fim_rep_token_id",),
    "file": ("fim_sep_token_id",),
}
"""Keys of fill-in-the-middle tokens by role; the second is the older name."""
_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


class _Fields:
    """The metadata below `tokenizer.ggml`, checked."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.tokens: list[str] = self._list("tokens", str)
        self.is_gemma = header.metadata.get("general.architecture") in _GEMMA
        if self.is_gemma:  # runs of blanks are written as they are, and looked up as the others
            self.tokens = [_BLANK * len(token) if _is_blank(token) else token for token in self.tokens]
        self.types: list[int] = self._list("token_type", int, has_to_be=False)
        if self.types and len(self.types) != len(self.tokens):
            raise self.error("token_type", f"{len(self.types)} types of {len(self.tokens)} tokens")
        if len(set(self.tokens)) < len(self.tokens):
            raise self.error("tokens", "a token comes twice")

    def text(self, name: str) -> str:
        return self._header.text(f"{_KEY}.{name}")

    def flag(self, name: str, default: bool) -> bool:
        return bool(self._header.metadata.get(f"{_KEY}.{name}", default))

    def begins_with_bos(self, model: str) -> bool:
        """Whether texts begin with BOS where `add_bos_token` is absent."""
        return model == "llama" or (self.text("pre") in _WITH_BOS and self.has("bos_token_id"))

    def number(self, name: str) -> int:
        value = self._header.metadata.get(f"{_KEY}.{name}")
        if not isinstance(value, int) or not 0 <= value < len(self.tokens):
            raise self.error(name, f"{value!r} is not an id of {len(self.tokens)} tokens")
        return value

    def token(self, name: str) -> str:
        return self.tokens[self.number(name)]

    def merges(self) -> list[tuple[str, str]]:
        pairs = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        if any(len(pair) != 2 for pair in pairs):
            raise self.error("merges", "an entry is not a pair")
        return pairs

    def scores(self) -> list[float]:
        if self.is_gemma:
            return [-float(place) for place in range(len(self.tokens))]
        scores = self._list("scores", float)
        if len(scores) != len(self.tokens):
            raise self.error("scores", f"{len(scores)} scores of {len(self.tokens)} tokens")
        return scores

    def has(self, name: str) -> bool:
        return f"{_KEY}.{name}" in self._header.metadata

    def error(self, name: str, reason: str) -> GgufError:
        return GgufError(f"{self._header.path}: {_KEY}.{name}: {reason}")

    def _list(self, name: str, of: type, has_to_be: bool = True) -> list[Any]:
        value = self._header.metadata.get(f"{_KEY}.{name}")
        if value is None and not has_to_be:
            return []
        if not isinstance(value, list) or (value and not isinstance(value[0], of)):
            raise self.error(name, f"is not a list of {of.__name__}")
        return value


def _byte_level(given: _Fields) -> dict[str, Any]:
    split = given.text("pre")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if split in _WITH_GPT2_SPLIT:
        pre_tokenizer: dict[str, Any] = byte_level
    elif split in _WITH_SINGLE_DIGITS:
        pre_tokenizer = _sequence({"type": "Digits", "individual_digits": True}, byte_level)
    elif split in _SPLITS:
        cut = {"type": "Split", "pattern": {"Regex": _SPLITS[split]}, "behavior": "Isolated", "invert": False}
        pre_tokenizer = _sequence(cut, byte_level | {"use_regex": False})
    else:
        known = ", ".join(sorted((*_WITH_GPT2_SPLIT, *_WITH_SINGLE_DIGITS, *_SPLITS)))
        raise given.error("pre", f"{split!r} is none of {known}")
    model = _bpe(given, given.merges()) | {"ignore_merges": split in _WITH_WHOLE_WORDS}
    return {
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": model,
    }


def _sentencepiece(given: _Fields) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _BLANK}
    has_prefix = not given.is_gemma and given.flag("add_space_prefix", True)
    normalizers = [{"type": "Prepend", "prepend": _BLANK}, replace] if has_prefix else [replace]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _BLANK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    merges = given.merges() if given.has("merges") else _merges_of_scores(given.tokens, given.scores())
    unknown = given.token("unknown_token_id") if given.has("unknown_token_id") else None
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": _bpe(given, merges) | {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True},
    }


def _bpe(given: _Fields, merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    vocab = {token: index for index, token in enumerate(given.tokens)}
    for left, right in merges:
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise given.error("merges", f"{left!r} {right!r} is of tokens that the vocabulary lacks")
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": vocab,
        "merges": [list(pair) for pair in merges],
    }


def _merges_of_scores(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges that a sentencepiece vocabulary implies: best score first, as transformers orders them."""
    ids = {token: index for index, token in enumerate(tokens)}
    merges = []
    for token, score in zip(tokens, scores, strict=True):
        cuts = [(token[:end], token[end:]) for end in range(1, len(token))]
        found = [(left, right) for left, right in cuts if left in ids and right in ids]
        merges += [(score, *pair) for pair in sorted(found, key=lambda pair: (ids[pair[0]], ids[pair[1]]))]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _added_tokens(given: _Fields, end_ids: Container[int]) -> list[dict[str, Any]]:
    """Control tokens, end tokens among them whatever type the file gives them, and user-defined tokens."""
    kinds = given.types or [0] * len(given.tokens)
    kinds = [_CONTROL if index in end_ids else kind for index, kind in enumerate(kinds)]
    shape = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [
        {"id": index, "content": token, **shape, "special": kind == _CONTROL}
        for index, (token, kind) in enumerate(zip(given.tokens, kinds, strict=True))
        if kind == _CONTROL or (kind == _USER_DEFINED and not (given.is_gemma and token == _BLANK * len(token)))
    ]


def _is_blank(token: str) -> bool:
    return len(token) > 1 and not token.strip(" ")


def _begin_with(token: str, token_id: int) -> dict[str, Any]:
    special, text, more = ({"SpecialToken": {"id": token, "type_id": 0}}, *_sequences())
    return {
        "type": "TemplateProcessing",
        "single": [special, text],
        "pair": [special, text, more],
        "special_tokens": {token: {"id": token, "ids": [token_id], "tokens": [token]}},
    }


def _sequences() -> tuple[dict[str, Any], dict[str, Any]]:
    return {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}


def _sequence(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "pretokenizers": list(parts)}
