import numpy as np
import pytest
from tokenizers import Tokenizer

from betoken.training.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, encode_stream, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n" * 5, "class Point:\n    pass\n" * 5]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=300)


def test_end_of_text_is_id_zero(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == 0
    assert tokenizer.get_vocab_size() <= 300


@pytest.mark.parametrize("text", ["return  a\n\n\tb", "naïve 🙂 \u0000", "日本語", " leading"])
def test_every_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_each_document_of_the_stream_ends_with_the_end_of_text(tokenizer: Tokenizer) -> None:
    stream = encode_stream(tokenizer, TEXTS)
    assert stream.dtype == np.uint16
    ends = np.flatnonzero(stream == END_OF_TEXT_ID)
    assert len(ends) == len(TEXTS) and ends[-1] == len(stream) - 1
    assert tokenizer.decode(stream[: ends[0]].tolist()) == TEXTS[0]
