"""The chat page in a browser: one Chromium for a file, with a new profile and a new gateway for each test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from betoken.router.text.tokenizer import Tokenizer
from tests.gateway.conftest import Gate, MakeGate, making_gates
from tests.gateway.page.browser import CHROMIUM, FLAGS, is_fault


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def browser() -> AsyncIterator[Any]:
    """Debian's Chromium, driven by Playwright."""
    playwright = pytest.importorskip("playwright.async_api")
    if CHROMIUM is None:
        pytest.skip("needs Debian's chromium")
    async with playwright.async_playwright() as driver:
        launched = await driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        await launched.close()


@pytest_asyncio.fixture(loop_scope="module")
async def make_gate(tokenizer: Tokenizer) -> AsyncIterator[MakeGate]:
    """Makes gateways in the browser's event loop."""
    async with making_gates(tokenizer) as make:
        yield make


@pytest_asyncio.fixture(loop_scope="module")
async def gate(make_gate: MakeGate) -> Gate:
    """One with a verify and a draft worker."""
    return await make_gate()


@pytest_asyncio.fixture(loop_scope="module")
async def page(browser: Any, make_gate: MakeGate) -> AsyncIterator[Any]:
    """A page that fails the test which makes it complain or ask elsewhere; it is closed before its gateway is."""
    faults: list[str] = []
    context = await browser.new_context(viewport={"width": 1280, "height": 900})
    opened = await context.new_page()
    opened.on("console", lambda message: faults.append(message.text) if is_fault(message) else None)
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("request", lambda request: "//127.0.0.1:" in request.url or faults.append(request.url))
    yield opened
    await context.close()
    assert not faults
