"""A stop string that no answer could hold is refused; none that one could."""

from __future__ import annotations

import json

import grpc
import pytest
from tokenizers import Tokenizer as FastTokenizer

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.router.text.alphabet import Alphabet
from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import byte_fallback_tokenizer_json, byte_tokenizer_json, running_cluster

WORDS = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {"id": 3, "content": "<eos>", "special": True, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
        "model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "day": 1, "##s": 2}, "unk_token": "[UNK]"}
        | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }
)


def without_byte(text: str, letter: str) -> str:
    data = json.loads(text)
    del data["model"]["vocab"][letter]
    for index, name in enumerate(data["model"]["vocab"]):  # no gaps
        data["model"]["vocab"][name] = index
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "stop", "absent"),
    [
        (byte_tokenizer_json(), "\x00 é \u6f22 \U0001f600", []),
        (byte_fallback_tokenizer_json(), "\x00 é \u6f22 \U0001f600", []),
        (WORDS, "days day<eos> [UNK]\ufffd", []),
        (WORDS, "Days\n", ["D", "\n"]),
        (without_byte(byte_tokenizer_json(), "X"), "éX\u6f22", ["X"]),
        (without_byte(byte_fallback_tokenizer_json(), "<0x58>"), "éXa\u6f22", ["X"]),
    ],
)
def test_the_alphabet_knows_characters_that_no_token_has(text: str, stop: str, absent: list[str]) -> None:
    assert Alphabet(FastTokenizer.from_str(text), text).absent(stop) == absent


async def test_a_stop_string_that_no_answer_could_hold_is_refused_by_name() -> None:
    async with running_cluster(Tokenizer(WORDS, {}, None, "test")) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.generate(prompt_ids=[1], max_new_tokens=2, stop=["day", "Day"])
        error = from_rpc_error(failed.value)
        assert isinstance(error, InvalidArgumentError)
        assert (error.field, error.value) == ("sampling.stop[1]", "Day")
        assert "none makes 'D'" in error.limit
        assert (await cluster.generate(prompt_ids=[1], max_new_tokens=2, stop=["days<eos>"])).ids
