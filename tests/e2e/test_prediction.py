"""A prediction saves rounds and changes no token: real services, the embedded pair."""

from __future__ import annotations

import random
from typing import Any

import pytest

from betoken.bench.stack import Stack
from betoken.client import AsyncClient, Completion, InvalidArgumentError

NUM_LINES, MAX_NEW_TOKENS = 60, 900
LEAST_SAVED = 2.5


def edited(text: str, rng: random.Random) -> str:
    """The text with three lines changed: one replaced, one left out, one put in."""
    lines = text.splitlines(keepends=True)
    first, second, third = sorted(rng.sample(range(3, len(lines) - 3), 3))
    lines.insert(third, "    # a new comment\n")
    del lines[second]
    lines[first] = "    raise NotImplementedError('later')\n"
    return "".join(lines)


async def ask(client: AsyncClient, prompt: str, **options: Any) -> Completion:
    options = {"max_new_tokens": MAX_NEW_TOKENS, "ignore_eos": True, "timeout_s": 300} | options
    if "drafter" in options:
        options["num_draft_tokens"] = 16  # as many as pay would depend on the clock
    return await client.complete(prompt, **options)


pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0, "repetition_penalty": 1.2}, {"temperature": 0.8, "seed": 4}], ids=str
)
async def test_rewriting_a_file_of_sixty_lines_takes_far_fewer_rounds(
    stack: Stack, prompts: list[str], options: dict[str, Any]
) -> None:
    """The file is what the target writes, up to its sixtieth line; the prediction is that with three edits undone."""
    client = stack.client
    file = await ask(client, prompts[2], off=True, **options)
    text, options = "", options | {"max_new_tokens": 0}
    for token in file.tokens:
        if text.count("\n") < NUM_LINES:
            text, options["max_new_tokens"] = text + token.text, options["max_new_tokens"] + 1
    assert text.count("\n") >= NUM_LINES
    prediction = edited(text, random.Random(1))
    without = await ask(client, prompts[2], drafter="ngram", **options)
    with_it = await ask(client, prompts[2], drafter="ngram", prediction=prediction, **options)
    assert with_it.output_ids == without.output_ids == file.output_ids[: options["max_new_tokens"]]
    saved = without.speculation.num_verify_forwards / with_it.speculation.num_verify_forwards
    assert saved >= LEAST_SAVED, f"{saved:.2f}"
    stats = with_it.speculation
    accepted = [token for token in with_it.tokens if token.source == "prediction"]
    assert len(accepted) == stats.num_accepted_prediction_tokens > len(with_it.output_ids) / 2
    assert stats.num_rejected_prediction_tokens <= stats.num_draft_tokens - stats.num_accepted_tokens


async def test_a_prediction_is_refused_where_nothing_drafts_from_it(stack: Stack, prompts: list[str]) -> None:
    client = stack.client
    for options in ({"off": True}, {"drafter": "model"}, {"prediction": [2**31]}):
        with pytest.raises(InvalidArgumentError, match=r"^prediction[\w.\[\]]* = "):
            await ask(client, prompts[0], **{"prediction": "def", "max_new_tokens": 4} | options)
