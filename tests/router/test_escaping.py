"""Chats whose messages spell no special tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from betoken.common.errors import InvalidArgumentError
from betoken.router.text.chat import Chat
from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import byte_fallback_tokenizer_json, byte_tokenizer_json, chat_ids

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NAMES = ["<eos>", "<|start|>", "<|end|>", "<|end|>more", "<tool>"]


def with_chat_tokens(text: str) -> str:
    fast = FastTokenizer.from_str(text)
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in NAMES[1:4]])
    fast.add_tokens([AddedToken("<tool>", normalized=False)])
    return fast.to_str()


TOKENIZERS = {
    "bytes": Tokenizer(with_chat_tokens(byte_tokenizer_json()), {}, TEMPLATE, "test"),
    "byte fallback": Tokenizer(with_chat_tokens(byte_fallback_tokenizer_json()), {}, TEMPLATE, "test"),
}


def added_ids(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    return [token_id for token_id in ids if token_id in tokenizer._fast.get_added_tokens_decoder()]


def escaped(tokenizer: Tokenizer, chat: list[dict[str, str]], continues: bool = False) -> list[int]:
    return tokenizer.escaping.encode(
        tokenizer.render(Chat(tokenizer.escaping.break_messages(chat), continues=continues))
    )


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(parts=st.lists(st.sampled_from([*NAMES, "<|end|", ">", "a b", " ", "\n", "é", "<|", "the"]), max_size=8))
@settings(deadline=None, max_examples=100)
def test_special_tokens_spelled_by_a_message_are_text_on_request(kind: str, parts: list[str]) -> None:
    tokenizer = TOKENIZERS[kind]
    content = "".join(parts)
    chat = [{"role": "user", "content": content}, {"role": "assistant", "content": content}]
    plain = chat_ids(tokenizer, [message | {"content": "a"} for message in chat])
    ids = escaped(tokenizer, chat)
    assert added_ids(tokenizer, ids) == added_ids(tokenizer, plain), "the template's own"
    whole = tokenizer._fast.decode(ids, skip_special_tokens=False)
    expected = tokenizer._fast.decode(chat_ids(tokenizer, chat), skip_special_tokens=False)
    assert whole.replace(" ", "") == expected.replace(" ", ""), "spaces around tokens are the decoder's"
    if not any(name in content for name in NAMES):
        assert ids == chat_ids(tokenizer, chat)


def test_special_tokens_spelled_by_a_message_are_tokens_by_default() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = chat_ids(tokenizer, [{"role": "user", "content": "hi<|end|>"}])
    assert added_ids(tokenizer, ids).count(tokenizer.special_ids["<|end|>"]) == 2


def test_ids_that_no_text_has_are_kept_where_the_vocabulary_begins_with_special_tokens() -> None:
    fast = FastTokenizer(WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    fast.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = Tokenizer(fast.to_str(), {}, "{{ messages[0].content }}</s>", "test")
    assert escaped(tokenizer, [{"role": "user", "content": "a"}]) == [2, 1]
    assert 1 not in escaped(tokenizer, [{"role": "user", "content": "</s>"}])[:-1]


def test_a_message_may_not_hold_what_marks_names() -> None:
    for mark in "\ufdd0\ufdd1":
        with pytest.raises(InvalidArgumentError, match="must hold neither where escape_special_tokens is set"):
            TOKENIZERS["bytes"].escaping.break_messages([{"role": "user", "content": f"a{mark}"}])


def test_a_continued_chat_may_be_escaped(tmp_path: Path) -> None:
    tokenizer = TOKENIZERS["bytes"]
    chat = [{"role": "user", "content": "<|end|>"}, {"role": "assistant", "content": "It is <eos>"}]
    ids = escaped(tokenizer, chat, continues=True)
    assert tokenizer.decode(ids).endswith("It is <eos>")
    assert json.loads(tokenizer._fast.to_str())["added_tokens"], "the tokenizer itself is as it was"
