"""Bytes of single tokens, in the three ways in which tokenizers write them."""

import json

import pytest
from tokenizers import Tokenizer as FastTokenizer

from betoken.rpc.token_bytes import TokenBytes
from tests.router.harness import byte_fallback_tokenizer_json, byte_tokenizer_json

WORD_PIECES = {
    "added_tokens": [],
    "model": {"type": "WordPiece", "vocab": {"[UNK]": 0, "day": 1, "##s": 2}, "unk_token": "[UNK]"}
    | {"continuing_subword_prefix": "##", "max_input_chars_per_word": 9},
    "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
}


def made(text):
    return FastTokenizer.from_str(text)


@pytest.mark.parametrize("text", [byte_tokenizer_json(), byte_fallback_tokenizer_json()], ids=["letters", "hex"])
def test_token_bytes_of_ids_join_to_the_text(text):
    fast = made(text)
    token_bytes = TokenBytes(fast, text)
    said = "ab\nthe é 🙂 \x00"
    ids = fast.encode(said, add_special_tokens=False).ids
    assert b"".join(map(token_bytes, ids)).decode().removeprefix(" ") == said
    assert any(b"\xf0" in token_bytes(token_id) for token_id in ids)  # a quarter of a character


def test_a_special_token_has_the_bytes_of_its_name_and_a_padding_id_has_none():
    text = byte_tokenizer_json()
    fast = made(text)
    token_bytes = TokenBytes(fast, text)
    assert token_bytes(fast.token_to_id("<eos>")) == b"<eos>"
    assert token_bytes(fast.get_vocab_size() + 7) == b""


def test_token_bytes_of_word_pieces_equal_the_decoders():
    text = json.dumps(WORD_PIECES | {"version": "1.0"})
    token_bytes = TokenBytes(made(text), text)
    assert [token_bytes(token_id) for token_id in (1, 2)] == [b"day", b"##s"]
