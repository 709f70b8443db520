"""Tokenizers of GGUF files: their ids by hand, and that what cannot be made exactly is refused."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from betoken.common.gguf import GgufError, GgufHeader, read_tokenizer

BYTES = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "<think>", "1", "2", "a", "b", "ab", "\u0120", "\u0120a", "12"],
    "tokenizer.ggml.token_type": [3, 4, 1, 1, 1, 1, 1, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b", "\u0120 a", "1 2"],
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.chat_template": "{{ messages }}",
}
PIECES = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "<0x61>", "\u2581", "b", "c", "bc", "\u2581bc"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -3.0, -4.0, -5.0, -1.0, -2.0],
    "tokenizer.ggml.token_type": [2, 3, 6, 1, 1, 1, 1, 1],
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
}


def header_of(metadata: dict[str, Any]) -> GgufHeader:
    return GgufHeader(Path("a.gguf"), {k: v for k, v in metadata.items() if v is not None}, (), 0)


def ids_of(metadata: dict[str, Any], text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_str(read_tokenizer(header_of(metadata)).text).encode(text).ids
    return ids


def test_a_byte_level_vocabulary_is_cut_as_its_makers_cut() -> None:
    assert ids_of(BYTES, "ab a12<|end|><think>") == [6, 8, 2, 3, 0, 1], "digits one by one, whatever merges say"
    assert ids_of(BYTES | {"tokenizer.ggml.pre": "gpt-2"}, "a12") == [4, 9]
    assert ids_of(BYTES | {"tokenizer.ggml.pre": "llama-bpe"}, "a12") == [4, 9]
    assert ids_of(BYTES | {"tokenizer.ggml.pre": "qwen2"}, "a12") == [4, 2, 3]


def test_token_names_and_chat_template_come_with_the_tokenizer() -> None:
    read = read_tokenizer(header_of(BYTES))
    assert read.config == {"eos_token": "<|end|>"} and read.chat_template == "{{ messages }}"
    tokens = Tokenizer.from_str(read.text).get_added_tokens_decoder()
    assert {index: token.special for index, token in tokens.items()} == {0: True, 1: False}


def test_a_text_may_begin_with_a_token() -> None:
    begun = BYTES | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": 0}
    assert ids_of(begun, "ab") == [0, 6]


@pytest.mark.parametrize("pre", ["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken", "lfm2"])
def test_bos_is_the_default_of_the_pre_tokenizers_that_llama_cpp_gives_it(pre: str) -> None:
    named = BYTES | {"tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 0}
    assert ids_of(named, "ab") == [0, 6]
    assert ids_of(named | {"tokenizer.ggml.add_bos_token": False}, "ab") == [6]
    assert ids_of(named | {"tokenizer.ggml.bos_token_id": None}, "ab") == [6]


def test_an_end_token_of_an_ordinary_type_is_read_as_a_special_token() -> None:
    changed = BYTES | {"tokenizer.ggml.token_type": [1, 4, 1, 1, 1, 1, 1, 1, 1, 1], "tokenizer.ggml.eos_token_id": None}
    fast = Tokenizer.from_str(read_tokenizer(header_of(changed)).text)
    assert fast.encode("a<|end|>").ids == [4, 0] and fast.decode([4, 0]) == "a"


def test_sentencepiece_merges_follow_scores_and_bytes_stand_in() -> None:
    assert ids_of(PIECES, "bc") == [1, 7]
    assert ids_of(PIECES, "bcabc") == [1, 7, 2, 6]
    fast = Tokenizer.from_str(read_tokenizer(header_of(PIECES)).text)
    assert fast.decode([1, 7, 2, 6]) == "bcabc"
    assert ids_of(PIECES | {"tokenizer.ggml.add_space_prefix": False}, "bc bc") == [1, 6, 7]


GEMMA = {
    "general.architecture": "gemma3",
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [
        *("<pad>", "<eos>", "<bos>", "<unk>", "<0x61>", "  ", "   ", "bc", "\u2581bc", "cb", "\u2581", "b", "c"),
        *("<turn>",),
    ],
    "tokenizer.ggml.scores": [-1.0] * 14,
    "tokenizer.ggml.token_type": [3, 3, 3, 2, 6, 4, 4, 1, 1, 1, 1, 1, 1, 4],
    "tokenizer.ggml.unknown_token_id": 3,
    "tokenizer.ggml.bos_token_id": 2,
    "tokenizer.ggml.add_space_prefix": False,
}


def test_gemma_merges_by_place_and_has_runs_of_blanks() -> None:
    assert ids_of(GEMMA, "bcb  c<turn>   bc") == [2, 7, 11, 5, 12, 13, 6, 7]
    fast = Tokenizer.from_str(read_tokenizer(header_of(GEMMA)).text)
    assert fast.decode([7, 11, 5, 12]) == "bcb  c"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"general.architecture": "gemma2"}, None),
        ({"general.architecture": "lfm2", "tokenizer.ggml.pre": "lfm2"}, BYTES),
        ({"general.architecture": "qwen35", "tokenizer.ggml.pre": "qwen35"}, BYTES),
        ({"general.architecture": "minimax-m2", "tokenizer.ggml.pre": "minimax-m2"}, BYTES),
    ],
)
def test_newer_vocabularies_equal_those_of_transformers(changes: dict[str, Any], text: Any) -> None:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    metadata = (text or GEMMA) | changes
    names = {"model": "tokenizer_type", "pre": "pre_tokenizer_type"}
    given = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items() if "ggml" in key}
    theirs, _ = convert_gguf_tokenizer(
        metadata["general.architecture"], {names.get(name, name): value for name, value in given.items()}
    )
    for sentence in ("bcb  c   bc b", "ab a12 ab\n\n  ab's 2"):
        ours = Tokenizer.from_str(read_tokenizer(header_of(metadata)).text).encode(sentence, add_special_tokens=False)
        assert ours.ids == theirs.encode(sentence, add_special_tokens=False).ids and len(ours.ids) > 3


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model = 'bert' is neither 'gpt2' nor 'llama'"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model = None is not text"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre: 'viking' is none of"),
        ({"tokenizer.ggml.tokens": 7}, "tokens: is not a list of str"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": None}, "a token comes twice"),
        ({"tokenizer.ggml.token_type": [1]}, "1 types of 10 tokens"),
        ({"tokenizer.ggml.merges": ["ab"]}, "merges: an entry is not a pair"),
        ({"tokenizer.ggml.merges": ["x y"]}, "'x' 'y' is of tokens that the vocabulary lacks"),
        ({"tokenizer.ggml.eos_token_id": 10}, "eos_token_id: 10 is not an id of 10 tokens"),
        ({"tokenizer.ggml.add_eos_token": True}, "add_eos_token = true"),
    ],
)
def test_an_unknown_tokenizer_is_rejected_by_name(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(GgufError, match=complaint):
        read_tokenizer(header_of(BYTES | changes))


def test_a_tokenizer_needs_as_many_scores_as_tokens() -> None:
    with pytest.raises(GgufError, match="1 scores of 8 tokens"):
        read_tokenizer(header_of(PIECES | {"tokenizer.ggml.scores": [0.0]}))
