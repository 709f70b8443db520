"""End tokens of GGUF files: ids of keys and of texts, as llama.cpp takes them."""

from pathlib import Path
from typing import Any

import pytest

from betoken.common.gguf import GgufError, GgufHeader, end_tokens


def ends_of(tokens: list[str], types: list[int] | None = None, **keys: Any) -> dict[int, str]:
    metadata = {f"tokenizer.ggml.{name}": value for name, value in keys.items()}
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types or [3] * len(tokens)}
    return end_tokens(GgufHeader(Path("a.gguf"), metadata, (), 0))


def test_end_tokens_are_those_of_the_keys_and_of_known_texts() -> None:
    tokens = ["a", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_pad|>", "<|file_sep|>"]
    by_text = {3: "<|im_end|>", 5: "<|fim_pad|>", 6: "<|file_sep|>"}
    assert ends_of(tokens, eos_token_id=1) == {1: "eos_token_id"} | by_text
    assert ends_of(["a", "b", "c"], eos_token_id=2, eom_token_id=0) == {0: "eom_token_id", 2: "eos_token_id"}
    assert ends_of(["a", "b"]) == {}


def test_an_end_token_may_have_any_type_but_an_html_tag_is_text() -> None:
    assert ends_of(["<|im_end|>", "</s>"], [1, 1]) == {0: "<|im_end|>"}
    assert ends_of(["<|im_end|>", "</s>"], [4, 3]) == {0: "<|im_end|>", 1: "</s>"}
    assert ends_of(["a", "</s>"], [1, 1], eos_token_id=1) == {1: "eos_token_id"}


def test_the_end_of_a_message_is_no_end_token_where_answers_have_several() -> None:
    harmony = ["<|end|>", "<|return|>", "<|call|>"]
    assert ends_of(harmony) == {1: "<|return|>", 2: "<|call|>"}
    assert ends_of(["<|end|>", "<|return|>"]) == {0: "<|end|>", 1: "<|return|>"}
    assert ends_of(["</s>", "<|tool_response>"]) == {1: "<|tool_response>"}


@pytest.mark.parametrize("value", [2, -1, "1"])
def test_an_end_token_outside_the_vocabulary_is_refused(value: Any) -> None:
    with pytest.raises(GgufError, match=r"a\.gguf: tokenizer\.ggml\.eot_token_id: .* is not an id of 2 tokens"):
        ends_of(["a", "b"], eot_token_id=value)
