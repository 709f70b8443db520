"""Conversations in the chat page: keys, stop, continue, regenerate, edit, storage, tools."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.gateway.conftest import Gate, MakeGate
from tests.gateway.page.browser import answered, ask, fill, prompts, saying, send, talkative, texts, visit
from tests.gateway.tools import OPEN_WEATHER, SPECIAL, TEMPLATES, WRITTEN
from tests.router.harness import CHAT_TEMPLATE, Tokenizer, byte_tokenizer_json

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="session")
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """Tokenizer with the chat template in `request.param`."""
    config = {"eos_token": "<eos>", "additional_special_tokens": SPECIAL}
    return Tokenizer(byte_tokenizer_json(), config, getattr(request, "param", CHAT_TEMPLATE), "test")


@pytest_asyncio.fixture(loop_scope="module")
async def slow(make_gate: MakeGate, tokenizer: Any) -> AsyncIterator[Gate]:
    """A gateway whose answers can be stopped."""
    yield await make_gate(model=talkative(tokenizer), step_s=0.02)


async def ask_and_read_the_start(page: Any, gate: Gate) -> None:
    """Ask, and wait for an answer's first words: a stop after a part of them would be right too."""
    await ask(page, gate)
    await page.wait_for_selector(".markdown:has-text('on the moon')")


async def stop_early(page: Any, gate: Gate) -> str:
    """Stop an answer after its first words; returns what is kept of it."""
    await ask_and_read_the_start(page, gate)
    await page.click("#stop")
    await answered(page)
    return (await texts(page, ".markdown"))[0].strip()


async def test_enter_sends_the_message_and_shift_enter_starts_a_new_line(page: Any, gate: Gate, tokenizer: Any) -> None:
    await visit(page, gate)
    await page.type("#question", "on")
    await page.press("#question", "Shift+Enter")
    await page.type("#question", "the")
    assert not gate.cluster.verifiers[0].opened
    await page.press("#question", "Enter")
    await answered(page)
    assert prompts(gate, tokenizer) == ["<user>on\nthe\n<assistant>"]
    assert await page.input_value("#question") == ""


async def test_a_stopped_answer_stays_in_the_conversation(page: Any, slow: Gate, tokenizer: Any) -> None:
    half = await stop_early(page, slow)
    assert "stopped" in await page.text_content(".stats")
    await send(page, "or")
    await page.wait_for_selector(".reply >> nth=1 >> .token")
    await page.click("#stop")
    await answered(page)
    assert half.startswith("on the moon")
    assert prompts(slow, tokenizer)[1].startswith(f"<user>the\n<assistant>{half}")


async def test_a_stopped_answer_continues_where_it_stopped(page: Any, slow: Gate, tokenizer: Any) -> None:
    half = await stop_early(page, slow)
    await fill(page, **{"max-tokens": "8"})
    await page.click(".continue")
    await answered(page)
    assert prompts(slow, tokenizer)[1].strip().endswith(f"<assistant>{half}")
    assert await page.locator(".reply").count() == 1
    assert len((await texts(page, ".markdown"))[0]) > len(half)
    assert "maximum length reached" in await page.text_content(".stats")


async def test_a_message_without_an_answer_returns_to_its_field(page: Any, gate: Gate) -> None:
    await ask(page, gate, **{"top-p": "2"})
    await page.wait_for_selector("#fault:not(:empty)")
    assert await page.input_value("#question") == "the"
    assert await page.locator(".turn").count() == 0 == await page.locator("#conversations li").count()


async def test_an_answer_is_regenerated_with_a_new_seed(page: Any, gate: Gate, tokenizer: Any) -> None:
    await ask(page, gate, **{"max-tokens": "12", "temperature": "1"})
    await answered(page)
    (before,) = await texts(page, ".markdown")
    await page.click(".regenerate")
    await answered(page)
    (after,) = await texts(page, ".markdown")
    assert before != after
    one, other = gate.cluster.verifiers[0].opened
    assert one.prompt_ids == other.prompt_ids and one.sampling.seed != other.sampling.seed


async def test_an_edited_message_replaces_the_rest_of_the_conversation(page: Any, gate: Gate, tokenizer: Any) -> None:
    await ask(page, gate, **{"max-tokens": "4"})
    await answered(page)
    await send(page, "or")
    await answered(page)
    await page.click(".edit >> nth=0")
    await page.fill(".user textarea", "on the moon")
    await page.press(".user textarea", "Enter")
    await answered(page)
    assert await texts(page, ".question") == ["on the moon"]
    assert prompts(gate, tokenizer)[-1] == "<user>on the moon\n<assistant>"


async def test_conversations_survive_a_reload_and_can_be_deleted(page: Any, gate: Gate, tokenizer: Any) -> None:
    await ask(page, gate, **{"max-tokens": "12"})
    await answered(page)
    await page.click("#clear")
    await send(page, "moon")
    await answered(page)
    await page.reload()
    assert await texts(page, "#conversations .open span") == ["moon", "the"]
    await page.click("#conversations .open >> nth=1")
    assert await texts(page, ".question") == ["the"] and await page.locator(".markdown .from-model").count() > 0
    assert await page.locator("#lanes g").count() > 0 < await page.locator("#numbers tbody tr").count()
    assert await page.input_value("#max-tokens") == "12"
    page.on("dialog", lambda dialog: dialog.accept())
    await page.click("#conversations .delete >> nth=1")
    await page.wait_for_selector("#conversations li >> nth=1", state="detached")
    await page.reload()
    assert await texts(page, "#conversations .open span") == ["moon"] and await page.locator(".turn").count() == 0


async def test_a_reload_keeps_the_half_of_an_answer(page: Any, slow: Gate) -> None:
    await ask_and_read_the_start(page, slow)
    await page.reload()
    await page.click("#conversations .open")
    assert (await texts(page, ".markdown"))[0].strip().startswith("on the moon")
    assert await page.is_visible(".continue")


async def test_full_storage_is_reported(page: Any, gate: Gate) -> None:
    await visit(page, gate)
    await page.evaluate("""() => { for (let size = 1 << 23; size >= 1; size >>= 1)
        try { localStorage.setItem(`fill${size}`, "x".repeat(size)) } catch {} }""")
    await send(page, "the")
    await page.wait_for_selector("#fault:not(:empty)")
    assert "storage is full" in await page.text_content("#fault")


async def test_an_answer_and_a_code_block_can_be_copied(page: Any, make_gate: MakeGate, tokenizer: Any) -> None:
    text = "Use **this**:\n\n```python\nprint(1)\n```"
    gate = await make_gate(model=saying(tokenizer, text))
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    await ask(page, gate)
    await answered(page)
    for button, copied in ((".reply .actions .copy", text), (".code .copy", "print(1)")):
        await page.click(button)
        await page.wait_for_selector(f"{button}:text('Copied')")
        assert (await page.evaluate("navigator.clipboard.readText()")).strip() == copied


@pytest.mark.parametrize("tokenizer", [None], indirect=True)
async def test_a_plain_text_is_as_long_as_the_context_allows(page: Any, make_gate: MakeGate) -> None:
    gate = await make_gate(verify_hellos=[{"max_context": 40}])
    await ask(page, gate)
    await answered(page)
    (entry,) = gate.cluster.verifiers[0].opened
    assert len(entry.prompt_ids) + entry.sampling.max_new_tokens == 40


@pytest.mark.parametrize("tokenizer", [TEMPLATES["hermes"]], indirect=True)
async def test_tool_calls_are_shown_and_their_results_are_sent(page: Any, make_gate: MakeGate, tokenizer: Any) -> None:
    gate = await make_gate(model=saying(tokenizer, WRITTEN["hermes"]))
    await ask(page, gate, tools=json.dumps([OPEN_WEATHER]))
    await answered(page)
    assert "weather" in await page.text_content(".call") and "Bern" in await page.text_content(".call pre")
    await page.fill(".results textarea", "It snows.")
    await page.click(".results button")
    await answered(page)
    assert "It snows." in prompts(gate, tokenizer)[-1]
    assert await page.locator(".turn").count() == 4
