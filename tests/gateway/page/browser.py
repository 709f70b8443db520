"""Steps in the chat page: settings, messages and answers."""

from __future__ import annotations

import shutil
from typing import Any

from betoken.testing.fake_model import FakeModel
from tests.gateway.conftest import Gate

CHROMIUM = shutil.which("chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


def is_fault(message: Any) -> bool:
    """The page's console output, except the browser's own message on a rejection."""
    return message.type in ("error", "warning") and "status of 400" not in message.text


def saying(tokenizer: Any, text: str) -> FakeModel:
    """A model that always answers `text`."""
    return FakeModel(tokenizer.vocab_size, script=tuple(tokenizer.encode(text)))


def talkative(tokenizer: Any) -> FakeModel:
    """A model that ends no answer by itself."""
    return saying(tokenizer, "on the moon, or " * 100)


async def visit(page: Any, gate: Gate) -> None:
    await page.goto(gate.url)
    await page.wait_for_selector("#workers table", state="attached")


async def fill(page: Any, **settings: str) -> None:
    """Fill in settings in their panel."""
    if not settings:
        return
    if not await page.is_visible("#settings"):
        await page.click("#show-settings")
    for name, value in settings.items():
        await page.fill(f"#{name}", value)
    await page.press("#settings", "Escape")


async def send(page: Any, question: str) -> None:
    await page.fill("#question", question)
    await page.press("#question", "Enter")


async def ask(page: Any, gate: Gate, **settings: str) -> None:
    await visit(page, gate)
    await fill(page, **settings)
    await send(page, "the")


async def answered(page: Any) -> None:
    await page.wait_for_selector("#send:enabled", timeout=60_000)
    assert await page.text_content("#fault") == ""


async def texts(page: Any, selector: str) -> list[str]:
    return await page.eval_on_selector_all(selector, "all => all.map(one => one.textContent)")


def prompts(gate: Gate, tokenizer: Any) -> list[str]:
    """Prompts that the verify worker received."""
    return [tokenizer.decode(entry.prompt_ids) for entry in gate.cluster.verifiers[0].opened]
