"""Completion for editors: `suffix` of completions, and `/infill` in the shapes that editors send."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from betoken.gateway.infill import InfillBody
from betoken.gateway.infill_end import EndRules
from betoken.router.text.tokenizer import Tokenizer
from betoken.testing.fake_model import FakeModel
from tests.gateway.conftest import Gate, MakeGate
from tests.router.harness import byte_tokenizer_json

MARKS = ["<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"]
MIDDLE = "    on = the\n\n    the\nlast\n"
GAP = {"input_prefix": "def f():\n", "input_suffix": "\nprint(1)\n"}
LLAMA_VIM = {
    "id_slot": 0,
    **GAP,
    "input_extra": [{"text": "the", "time": [4711, -12], "filename": "a.py"}, {"text": "b", "filename": "a.py"}],
    "prompt": "    ",
    "n_predict": 128,
    "stop": [],
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.90,
    "samplers": ["top_k", "top_p", "infill"],
    "stream": False,
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 60000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_ms", "truncated", "tokens_cached"],
    "model": "",
}
"""As llama.vim sends it."""
WARM_UP = {
    **{"id_slot": 0, "input_prefix": "", "input_suffix": "", "input_extra": LLAMA_VIM["input_extra"], "prompt": ""},
    **{"n_predict": 0, "temperature": 0.0, "samplers": [], "stream": False, "cache_prompt": True},
    **{"t_max_prompt_ms": 1, "t_max_predict_ms": 1, "response_fields": [""]},
}
"""As it sends it ahead of the next completion."""
CONTINUE = {
    "model": "fake",
    "prompt": "<|fim_prefix|>def f():\n<|fim_suffix|>\nprint(1)\n<|fim_middle|>",
    "max_tokens": 64,
    "temperature": 0.01,
    "stream": True,
    "stop": ["<|endoftext|>", *MARKS[:3], *MARKS[3:], "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```"],
}
"""As Continue sends it to completions of OpenAI's."""
TABBY = {
    "model": "fake",
    "prompt": "def f():\n",
    "suffix": "\nprint(1)\n",
    "max_tokens": 64,
    "temperature": 0.1,
    "stream": True,
    "presence_penalty": 0.0,
}
"""As Tabby sends it to completions of OpenAI's."""
TABBY_LLAMA = {
    "seed": 7,
    "prompt": CONTINUE["prompt"],
    "n_predict": 64,
    "temperature": 0.1,
    "stream": True,
    "penalty_last_n": 0,
    "presence_penalty": 0.0,
}
"""As Tabby sends it to llama.cpp."""
CONTINUE_LLAMA = {
    "prompt": CONTINUE["prompt"],
    "stream": True,
    "n_predict": 64,
    "stop": CONTINUE["stop"],
    "temperature": 0.01,
}
"""As Continue sends it to llama.cpp."""
TABBY_MISTRAL = {
    "prompt": "def f():\n",
    "suffix": "\nprint(1)\n",
    "model": "fake",
    "temperature": 0.1,
    "max_tokens": 64,
    "stream": True,
    "random_seed": 7,
}
"""As Tabby sends it to Mistral's endpoint."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    fast = FastTokenizer.from_str(byte_tokenizer_json())
    fast.add_special_tokens(MARKS)
    return Tokenizer(fast.to_str(), {"eos_token": "<eos>"}, None, "test")


@pytest.fixture
async def gate(make_gate: MakeGate, tokenizer: Tokenizer) -> Gate:
    """Every answer is MIDDLE, and ends with a token of the format."""
    script = (*tokenizer.encode(MIDDLE), tokenizer.special_ids["<|fim_pad|>"], *tokenizer.encode("more"))
    return await make_gate(
        model=FakeModel(tokenizer.vocab_size, script=script), draft_hellos=[{"predicting_drafters": ["ngram"]}]
    )


def texts(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def drafted_prompts(gate: Gate) -> set[tuple[int, ...]]:
    """Prompts that the draft worker has seen, without the router's probes."""
    return {tuple(opened.prompt_ids) for opened in gate.cluster.drafters[0].opened if len(opened.prompt_ids) > 1}


async def test_a_suffix_of_completions_is_an_infill(gate: Gate, tokenizer: Tokenizer) -> None:
    body = {"prompt": ["a", "the"], "suffix": "on", "max_tokens": 64}
    told = (await gate.post("/v1/completions", body)).json()
    assert [(choice["text"], choice["finish_reason"]) for choice in told["choices"]] == [(MIDDLE, "stop")] * 2
    pre, mid, suf = (tokenizer.special_ids[name] for name in MARKS[:3])
    expected = {(pre, *tokenizer.encode(text), suf, *tokenizer.encode("on"), mid) for text in ("a", "the")}
    assert drafted_prompts(gate) <= expected and told["usage"]["prompt_tokens"] == sum(map(len, expected))
    info = (await gate.http.get("/v1/models")).json()["data"][0]["betoken"]
    assert info["supports_infill"] is True


@pytest.mark.parametrize("body", [CONTINUE, TABBY], ids=["Continue", "Tabby"])
async def test_completions_of_an_editor_are_infills(gate: Gate, body: dict[str, Any]) -> None:
    reply = await gate.post("/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in texts(reply.text)) == MIDDLE
    asked = await gate.post("/infill", {**GAP, "temperature": 0})
    assert asked.json()["content"] == MIDDLE, "the same gap"
    assert len(drafted_prompts(gate)) == 1


@pytest.mark.parametrize("body", [CONTINUE_LLAMA, TABBY_LLAMA], ids=["Continue", "Tabby"])
async def test_a_completion_of_llama_cpp_is_the_infill_of_its_prompt(gate: Gate, body: dict[str, Any]) -> None:
    told = texts((await gate.post("/completion", body)).text)
    assert "".join(event["content"] for event in told) == MIDDLE
    assert [event["stop"] for event in told] == [False] * (len(told) - 1) + [True]
    assert (await gate.post("/infill", {**GAP, "temperature": 0})).json()["content"] == MIDDLE, "the same gap"
    assert len(drafted_prompts(gate)) == 1


async def test_a_completion_of_llama_cpp_takes_token_ids(gate: Gate, tokenizer: Tokenizer) -> None:
    body = {"prompt": tokenizer.encode("the"), "n_predict": 3, "return_tokens": True, "temperature": 0}
    told = (await gate.post("/completion", body)).json()
    assert told["tokens"] == list(tokenizer.encode(MIDDLE))[:3] and told["stop_type"] == "limit"


async def test_a_fim_completion_of_mistral_is_an_infill_whose_events_all_have_text(gate: Gate) -> None:
    told = texts((await gate.post("/v1/fim/completions", TABBY_MISTRAL)).text)
    assert "".join(event["choices"][0]["delta"]["content"] for event in told) == MIDDLE
    assert told[-1]["choices"][0]["finish_reason"] == "stop" and told[0]["object"] == "chat.completion.chunk"
    whole = (await gate.post("/v1/fim/completions", TABBY_MISTRAL | {"stream": False})).json()
    assert whole["choices"][0]["message"]["content"] == MIDDLE and whole["choices"][0]["betoken"]["seed"] == 7
    assert len(drafted_prompts(gate)) == 1


async def test_an_infill_of_llama_vim_is_answered_in_its_fields(gate: Gate, tokenizer: Tokenizer) -> None:
    told = (await gate.post("/infill", LLAMA_VIM)).json()
    assert list(told) == ["content", "timings/prompt_n", "timings/predicted_ms", "tokens_cached"]
    assert told["content"] == MIDDLE
    layout = "<|repo_name|>myproject\n<|file_sep|>a.py\nthe<|file_sep|>a.py\nb<|file_sep|>filename\n"
    layout += "<|fim_prefix|>def f():\n    <|fim_suffix|>\nprint(1)\n<|fim_middle|>"
    opened = gate.cluster.drafters[0].opened[-1]
    assert tokenizer.decode(list(opened.prompt_ids)) == tokenizer.decode(tokenizer.encode(layout))
    assert opened.sampling.temperature == 0, "its sampler infill is greedy"


async def test_the_warm_up_infill_of_llama_vim_computes_the_prompt(gate: Gate) -> None:
    reply = await gate.post("/infill", WARM_UP)
    assert (reply.status_code, reply.json()) == (200, {})
    told = (await gate.post("/infill", {**WARM_UP, "response_fields": None})).json()
    assert (told["content"], told["tokens_predicted"]) == ("", 0) and told["tokens_evaluated"] > 5
    await gate.cluster.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_infill_ends_before_a_line_with_too_little_indentation(gate: Gate, stream: bool) -> None:
    reply = await gate.post("/infill", {**GAP, "n_indent": 4, "stream": stream, "return_tokens": True})
    told = texts(reply.text) if stream else [reply.json()]
    assert "".join(one["content"] for one in told) == "    on = the\n\n    the\n"
    assert [one["stop"] for one in told] == [False] * (len(told) - 1) + [True]
    assert told[-1]["stop_type"] == "limit" and told[0]["tokens"] and "[DONE]" not in reply.text
    await gate.cluster.until_idle()


async def test_an_infill_that_takes_too_long_ends_with_a_line(make_gate: MakeGate, tokenizer: Tokenizer) -> None:
    model = FakeModel(tokenizer.vocab_size, script=tuple(tokenizer.encode("the\n" * 200)))
    gate = await make_gate(model=model, step_s=0.02, num_drafters=0)
    told = (await gate.post("/infill", {**GAP, "n_predict": 400, "t_max_predict_ms": 200})).json()
    assert set(told["content"].splitlines()) == {"the"} and told["content"].endswith("\n")
    assert 8 < len(told["content"]) < 400 and told["tokens_predicted"] < 200
    assert (await gate.post("/infill", {**GAP, "n_predict": 3, "t_max_predict_ms": 1})).json()["stop_type"] == "limit"
    await gate.cluster.until_idle()


async def test_a_whole_infill_has_the_fields_of_llama_cpp(gate: Gate, tokenizer: Tokenizer) -> None:
    told = (await gate.post("/infill", {**GAP, "seed": -1, "stop": ["last"], "return_tokens": True})).json()
    assert (told["stop"], told["stop_type"], told["stopping_word"]) == (True, "word", "last")
    assert told["content"] == "    on = the\n\n    the\n" and tokenizer.decode(told["tokens"]).endswith("the\nlast")
    assert told["timings"]["predicted_n"] == told["tokens_predicted"] == len(told["tokens"])
    assert told["model"] == "fake" and 0 <= told["betoken"]["seed"] < 2**53


async def test_an_infill_has_the_served_model_name(make_gate: MakeGate) -> None:
    gate = await make_gate({"served_model_name": ("coder",)}, num_drafters=0)
    told = (await gate.post("/infill", {**GAP, "model": "coder", "n_predict": 2})).json()
    assert told["model"] == "coder"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix"),
        ("/infill", {**GAP, "input_extra": [{"filename": "a"}]}, "input_extra[0].text"),
        ("/infill", {**GAP, "input_extra": [{"text": "", "filename": "a" * 4097}]}, "input_extra[0].name"),
        ("/infill", {**GAP, "n_predict": 10**6}, "n_predict"),
        ("/infill", {**GAP, "n_predict": -2}, "n_predict"),
        ("/infill", {**GAP, "samplers": ["mirostat"]}, "samplers[0]"),
        ("/infill", {**GAP, "mirostat": 2}, "mirostat"),
        ("/infill", {**GAP, "repeat_penalty": 1e9}, "repeat_penalty"),
        ("/infill", {**GAP, "repeat_last_n": 64}, "repeat_last_n"),
        ("/infill", {**GAP, "wishes": 1}, "wishes"),
        ("/infill", {**GAP, "betoken": {"add_special_tokens": False}}, "betoken.add_special_tokens"),
        ("/completion", {"prompt": ["a"]}, "prompt"),
        ("/completion", {"prompt": "a", "mirostat": 2}, "mirostat"),
        ("/completion", {"prompt": "a", "input_suffix": "b"}, "input_suffix"),
        ("/v1/fim/completions", {"prompt": "a", "seed": 1}, "seed"),
        ("/v1/fim/completions", {"prompt": "a", "random_seed": -1}, "random_seed"),
        ("/v1/fim/completions", {"prompt": "a", "max_tokens": 10**6}, "max_tokens"),
        ("/v1/completions", {"prompt": [5], "suffix": "a"}, "suffix"),
        ("/v1/completions", {"prompt": "a", "suffix": "a", "echo": True}, "echo"),
    ],
)
async def test_a_bad_field_of_an_infill_is_rejected_by_name(
    gate: Gate, path: str, body: dict[str, Any], param: str
) -> None:
    reply = await gate.post(path, body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_samplers_of_an_infill_that_are_not_listed_are_not_applied() -> None:
    def sampling(**fields: Any) -> Any:
        return InfillBody.model_validate(GAP | fields).questions()[0].sampling

    given = {"temperature": 0.5, "top_k": 9, "top_p": 0.5, "min_p": 0.1, "repeat_penalty": 1.5}
    every = sampling(**given)
    assert (every.temperature, every.top_k, every.top_p, every.min_p, every.repetition_penalty) == (
        0.5,
        9,
        0.5,
        0.1,
        1.5,
    )
    few = sampling(**given, samplers=["top_p"])
    assert (few.temperature, few.top_k, few.top_p, few.min_p, few.repetition_penalty) == (1.0, 0, 0.5, 0.0, 1.0)
    assert sampling(**given, samplers=["temperature", "infill"]).temperature == 0


@pytest.mark.parametrize(
    ("text", "end", "num_held"),
    [
        ("a\n    b", None, 0),
        ("a\n  b", 2, 0),
        ("a\n\n    b\nc", 9, 0),
        ("a\n  ", None, 2),
        ("a\n\n", None, 1),
        ("a", None, 0),
    ],
)
def test_indentation_counts_in_lines_of_an_infill_that_are_not_blank(text: str, end: int | None, num_held: int) -> None:
    rules = EndRules(min_indent=4)
    assert rules.end_of(text) == end and (end is not None or rules.held(text) == num_held)
    assert EndRules().end_of(text) is None and EndRules().held(text) == 0
