"""Structured answers through all three services: valid where complete, and the same whatever drafts."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import pytest_asyncio

from betoken.client import AsyncClient, Completion, InvalidArgumentError
from betoken.verify_worker import core
from betoken.verify_worker.verify import finish_step
from tests.e2e.in_process import save_pair, save_pard_pair, services
from tests.e2e.schemas import CALL, EVENT, PERSON
from tests.products import covering

pytestmark = pytest.mark.asyncio(loop_scope="module")
PLAIN = {"off": True}
CELLS: dict[str, dict[str, Any]] = {
    "model": {"drafter": "model", "num_draft_tokens": 4},
    "tree of a model": {"drafter": "model", "drafter_settings": {"max_branches": 3}, "num_draft_tokens": 6},
    "tree of n-grams": {"drafter": "ngram", "num_draft_tokens": 8},
    "grammar": {"drafter": "grammar", "num_draft_tokens": 8},
}
PROMPT = 'Say {"name": "ab", "age": 12, "at": "2020-01-02"}, "on" or "off", [1, 2], null, true, 12-34: '


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    save_pair(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(folder: Path) -> AsyncIterator[AsyncClient]:
    async with services(folder, verify_options={"attached_drafters": ("grammar",)}) as client:
        yield client


async def answer(client: AsyncClient, schema: Any, **options: Any) -> Completion:
    options = {"max_new_tokens": 100, "seed": 5} | options
    return await client.complete(PROMPT, constraint={"json_schema": schema}, timeout_s=120, **options)


@pytest.mark.parametrize(("mode", "drafter"), covering(["rejection", "typical"], ["model", "ngram"], strength=1))
async def test_constrained_answers_of_other_modes_are_valid_too(client: AsyncClient, mode: str, drafter: str) -> None:
    options: dict[str, Any] = {"mode": mode, "drafter": drafter, "num_draft_tokens": 4, "temperature": 1.0}
    completions = await asyncio.gather(*(answer(client, PERSON, seed=seed, **options) for seed in range(8)))
    complete = [each for each in completions if each.finish_reason == "stop"]
    assert complete
    for completion in complete:
        jsonschema.validate(json.loads(completion.text), PERSON)


async def test_parallel_drafts_change_no_constrained_answer(tmp_path: Path) -> None:
    save_pard_pair(tmp_path)
    async with services(tmp_path) as client:
        plain = await answer(client, EVENT, temperature=0.8, **PLAIN)
        for cell in ("model", "tree of a model"):
            drafted = await answer(client, EVENT, temperature=0.8, **CELLS[cell])
            assert plain.output_ids == drafted.output_ids and plain.finish_reason == "stop"
            assert drafted.speculation.num_accepted_tokens and not drafted.speculation.num_failed_drafts


async def test_sampling_fields_apply_together_with_a_constraint(client: AsyncClient) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {40: 5.0},
        "logprobs": 3,
    }
    plain = await answer(client, EVENT, **fields, **PLAIN)
    drafted = await answer(client, EVENT, **fields, **CELLS["model"])
    assert plain.output_ids == drafted.output_ids and plain.finish_reason == "stop"
    jsonschema.validate(json.loads(plain.text), EVENT)
    assert all(len(token.logprobs.top) == 3 for token in drafted.tokens)


async def test_lengths_and_stop_rules_end_a_constrained_answer(client: AsyncClient) -> None:
    compact = EVENT | {"x-guidance": {"whitespace_pattern": " ?"}}
    whole = await answer(client, compact, temperature=0.8)
    assert whole.finish_reason == "stop" and json.loads(whole.text)
    cut = await answer(client, compact, temperature=0.8, stop=['"who"'])
    assert cut.text == whole.text[: whole.text.index('"who"')] and cut.stop == '"who"'
    short = await answer(client, compact, temperature=0.8, max_new_tokens=9)
    assert short.output_ids == whole.output_ids[:9] and short.finish_reason == "length"
    for speculation in (PLAIN, CELLS["model"]):
        early = await client.complete(
            PROMPT, constraint={"choice": ["yes", "no"]}, min_new_tokens=40, max_new_tokens=60, seed=1, **speculation
        )
        assert early.text in ("yes", "no") and early.finish_reason == "stop", "the grammar is the stronger"
    spun = await answer(client, {"type": "string", "maxLength": 60}, temperature=0.0, min_new_tokens=30)
    assert len(spun.output_ids) > 30 and isinstance(json.loads(spun.text), str)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"regex": "[a-f]{3}-[0-9]{2}"}, r"[a-f]{3}-[0-9]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"lark": 'start: "<" w ">"\nw: /[xy]{1,4}/'}, "<[xy]{1,4}>"),
    ],
)
async def test_other_kinds_of_constraints_give_valid_answers(
    client: AsyncClient, constraint: Any, pattern: str
) -> None:
    options: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.0, "seed": 2}
    plain = await client.complete(PROMPT, constraint=constraint, **options, **PLAIN)
    assert re.fullmatch(pattern, plain.text) and plain.finish_reason == "stop"
    for cell in CELLS.values():
        assert (await client.complete(PROMPT, constraint=constraint, **options, **cell)).output_ids == plain.output_ids
    anything = await client.complete(PROMPT, constraint={"json_object": True}, **options | {"max_new_tokens": 100})
    assert anything.text.startswith("{")


async def test_a_constrained_answer_is_resumed_in_its_middle(client: AsyncClient) -> None:
    whole = await answer(client, EVENT, temperature=0.8, **PLAIN)
    for num_kept in (1, 7, len(whole.output_ids) - 1):
        kept = whole.output_ids[:num_kept]
        rest = await answer(client, EVENT, temperature=0.8, resume_ids=kept, **CELLS["model"])
        assert [*kept, *rest.output_ids] == list(whole.output_ids)
    with pytest.raises(InvalidArgumentError, match="resume_ids"):
        await answer(client, EVENT, temperature=0.8, resume_ids=[*whole.output_ids[:3], whole.output_ids[0]])


async def test_preemption_changes_no_constrained_answer(folder: Path) -> None:
    schemas = [PERSON, EVENT, CALL, {"type": "string", "maxLength": 90, "minLength": 80}] * 2
    options: dict[str, Any] = {"temperature": 0.8, "max_new_tokens": 110}

    async def answers(client: AsyncClient, **speculation: Any) -> list[list[int]]:
        asked = (answer(client, schema, seed=seed, **options, **speculation) for seed, schema in enumerate(schemas))
        return [list(each.output_ids) for each in await asyncio.gather(*asked)]

    async with services(folder) as roomy:
        expected = await answers(roomy, **PLAIN)
    async with services(folder, verify_options={"num_pages": 18}) as tight:
        assert await answers(tight, **CELLS["tree of a model"]) == expected
        info = await tight.model_info()
        assert info.verify_workers[0].preemptions > 0


@pytest.mark.parametrize(
    ("constraint", "field", "words"),
    [
        ({"json_schema": "{"}, "constraint.json_schema", "Expecting"),
        ({"json_schema": {"type": "objekt"}}, "constraint.json_schema", "Invalid type"),
        ({"regex": "(a"}, "constraint.regex", "unclosed group"),
        ({"regex": "a" * 70_000}, "constraint.regex", "at most 65536"),
        ({"lark": "start: nope"}, "constraint.lark", "unknown name"),
        ({"choice": []}, "constraint.choice.texts", "at least 1"),
        ({}, "constraint", "one of json_object"),
        ({"regex": "a", "lark": "b"}, "constraint", "one of json_object"),
    ],
)
async def test_a_bad_constraint_is_refused_by_name(
    client: AsyncClient, constraint: Any, field: str, words: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{field} = .*{words}"):
        await client.complete("x", constraint=constraint)
    with pytest.raises(InvalidArgumentError, match="ignore_eos"):
        await client.complete("x", constraint={"regex": "a"}, ignore_eos=True)


async def test_failover_changes_no_constrained_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that a worker loses are opened again from their ids, and their grammars with them."""
    num_forwards = 0

    def failing(*args: Any) -> Any:
        nonlocal num_forwards
        num_forwards += 1
        if num_forwards % 10 == 0:
            raise RuntimeError("lost")
        return finish_step(*args)

    async with services(folder) as client:
        for cell in (PLAIN, CELLS["model"], CELLS["tree of n-grams"]):
            expected = await answer(client, PERSON, temperature=0.8, **cell)
            with monkeypatch.context() as patch:
                patch.setattr(core, "finish_step", failing)
                lost = await answer(client, PERSON, temperature=0.8, **cell)
            assert lost.output_ids == expected.output_ids
            assert lost.speculation.num_failovers > 0


@pytest.mark.parametrize(
    ("mode", "num_draft_tokens"), covering([None, "rejection", "typical"], [None, 1, 3, 16], strength=1)
)
async def test_every_forced_token_is_accepted(
    client: AsyncClient, mode: str | None, num_draft_tokens: int | None
) -> None:
    """Alone they fill a good part of an answer, whatever the logits are, and need no forward."""
    options: dict[str, Any] = {"temperature": 1.0, "num_draft_tokens": num_draft_tokens, "mode": mode}
    for schema in (PERSON, CALL, EVENT):
        compact = schema | {"x-guidance": {"whitespace_pattern": " ?"}}
        plain = await answer(client, compact, temperature=1.0, max_new_tokens=150, **PLAIN)
        drafted = await answer(client, compact, drafter="grammar", max_new_tokens=150, **options)
        assert drafted.output_ids == plain.output_ids and plain.finish_reason == "stop"
        stats = drafted.speculation
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0.2 * len(plain.output_ids)
        assert [token.source for token in drafted.tokens].count("grammar") == stats.num_accepted_tokens
        assert stats.num_verify_forwards == len(plain.output_ids) - stats.num_accepted_tokens
    free = await client.complete(PROMPT, drafter="grammar", max_new_tokens=20, temperature=0.0)
    assert free.speculation.num_draft_tokens == 0, "without a constraint nothing is forced"


async def test_forced_tokens_come_before_another_drafters(folder: Path) -> None:
    async with services(folder, verify_options={"attached_drafters": ("ngram", "grammar")}) as client:
        num_forwards = {}
        for temperature in (0.0, 0.8):
            plain = await answer(client, EVENT, temperature=temperature, **PLAIN)
            drafted = await answer(client, EVENT, temperature=temperature, drafter="ngram", num_draft_tokens=6)
            assert drafted.output_ids == plain.output_ids
            sources = {token.source for token in drafted.tokens} - {None}
            assert sources == {"grammar", "ngram"}
            num_forwards[temperature] = drafted.speculation.num_verify_forwards, plain.speculation.num_verify_forwards
        assert all(few < many for few, many in num_forwards.values())
        info = await client.model_info()
        assert "grammar" in {source.name for source in info.sources}


async def test_several_constrained_answers_share_the_prompts_kv(client: AsyncClient) -> None:
    options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.9, "seed": 3, "ignore_eos": True}
    several = await client.complete_all(PROMPT, n=4, **options)
    assert len({each.output_ids for each in several}) == 4
    for each in several:
        alone = await client.complete(PROMPT, **options | {"seed": each.seed})
        assert alone.output_ids == each.output_ids
    fresh = await client.complete_all("A prompt of several pages that is not cached: 0123456789", n=3, **options)
    assert fresh[0].usage.cached_prompt_tokens == 0
    assert all(each.usage.cached_prompt_tokens >= 48 for each in fresh[1:])
