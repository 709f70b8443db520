"""`echo` with `logprobs`: prompt and answer in one, each token with its logprob and its place in the text."""

from __future__ import annotations

from typing import Any

import pytest

from betoken.client import Logprobs, Token, TokenOrigin
from betoken.gateway.logprobs import chat_logprobs, prompt_offsets
from tests.gateway.conftest import Gate

PROMPT = "the é on"
ASKED: dict[str, Any] = {"model": "fake", "seed": 3, "max_tokens": 6, "logprobs": 1}


async def test_echo_reports_prompt_and_answer_alike(gate: Gate, tokenizer: Any) -> None:
    ids = tokenizer.encode(PROMPT)
    plain = (await gate.openai.completions.create(prompt=PROMPT, **ASKED)).choices[0]
    for prompt in (PROMPT, ids):
        echoed = (await gate.openai.completions.create(prompt=prompt, echo=True, **ASKED)).choices[0]
        told, answer = echoed.logprobs, plain.logprobs
        assert echoed.text == PROMPT + plain.text
        num = len(ids)
        assert told.tokens[num:] == answer.tokens and told.top_logprobs[num:] == answer.top_logprobs
        assert told.token_logprobs == [None, *(-0.5 * position for position in range(1, num)), *answer.token_logprobs]
        assert told.top_logprobs[:num] == [None, *({told.tokens[n]: -0.5 * n} for n in range(1, num))]
        assert told.text_offset[num:] == [len(PROMPT) + offset for offset in answer.text_offset]
        whole = [
            (name, offset) for name, offset in zip(told.tokens, told.text_offset, strict=True) if offset < len(PROMPT)
        ]
        assert all(PROMPT.startswith(name, offset) for name, offset in whole if "bytes:" not in name)


async def test_echo_reports_the_same_for_lists_several_answers_and_streams(gate: Gate, tokenizer: Any) -> None:
    prompts = [PROMPT, "on the"]
    options = ASKED | {"prompt": prompts, "echo": True, "n": 2, "temperature": 1.0}
    whole = (await gate.openai.completions.create(**options)).choices
    assert [choice.logprobs.tokens[0] for choice in whole[:2]] == [
        choice.logprobs.tokens[0] for choice in whole[:1]
    ] * 2
    joined: list[dict[str, list[Any]]] = [{} for _ in whole]
    async for event in await gate.openai.completions.create(stream=True, **options):
        choice = event.choices[0]
        for name, entries in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
            joined[choice.index].setdefault(name, []).extend(entries)
    assert joined == [choice.logprobs.model_dump() for choice in whole]


@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_without_an_answer(
    gate: Gate, tokenizer: Any, logprobs: int | None, stream: bool
) -> None:
    options = ASKED | {"prompt": PROMPT, "echo": True, "max_tokens": 0, "logprobs": logprobs, "stream": stream}
    reply = await gate.openai.completions.create(**options)
    choices = [event.choices[0] async for event in reply] if stream else reply.choices
    assert "".join(choice.text for choice in choices) == PROMPT and choices[-1].finish_reason == "length"
    told = choices[0].logprobs
    assert (told is None) if logprobs is None else len(told.token_logprobs) == len(tokenizer.encode(PROMPT))
    await gate.cluster.until_idle()


@pytest.mark.parametrize(
    ("text", "pieces", "offsets"),
    [
        ("aé🙂b", [b"a", b"\xc3", b"\xa9", "🙂b".encode()], [0, 1, 1, 2]),
        ("ab", [b"<s>", b" a", b"b"], [0, 0, 1]),  # a special token has no text, nor has the space put before
        ("<s>ab", [b"<s>", b"a", b"b"], [0, 3, 4]),
        ("a\ufffdb", [b"a", b"\xff", b"b"], [0, 1, 2]),
        ("", [b"<s>"], [0]),
    ],
)
def test_text_offsets_of_logprobs_count_code_points(text: str, pieces: list[bytes], offsets: list[int]) -> None:
    assert prompt_offsets(text, pieces) == offsets


def test_the_logprob_of_an_impossible_token_is_a_number() -> None:
    token = Token(1, TokenOrigin.PLAIN, None, "a", Logprobs(float("-inf"), ((1, float("-inf")),)))
    (entry,) = chat_logprobs([token], lambda token_id: b"a")["content"]
    assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
