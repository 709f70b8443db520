"""The page in a real browser: Debian's Chromium, driven by Playwright, on a gateway over fake workers."""

from __future__ import annotations

from typing import Any

import pytest

from betoken.v1.types_pb2 import Constraint
from tests.gateway.conftest import Gate, MakeGate
from tests.gateway.page.browser import answered, ask, fill, send, talkative, visit
from tests.products import covering

axe = pytest.importorskip("axe_playwright_python.async_playwright")
pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_answer_streams_in_colours_with_lanes_and_numbers(
    page: Any, make_gate: MakeGate, tokenizer: Any
) -> None:
    gate = await make_gate(model=talkative(tokenizer), step_s=0.02)
    await ask(page, gate, **{"max-tokens": "60", "seed": "18446744073709551615"})
    await page.wait_for_selector(".markdown .token")
    assert await page.is_enabled("#stop")  # it is still coming
    await answered(page)
    await page.click(".show-tokens")
    colours = await page.eval_on_selector_all(".tokens .token", "all => all.map(one => one.className)")
    assert len(colours) == 60
    assert {"token from-model", "token from-recovered"} <= set(colours)
    opened = await page.eval_on_selector_all("#lanes g", "all => all.length")
    assert opened == await page.eval_on_selector_all("#lanes tbody tr", "all => all.length") > 5
    assert await page.locator("#lanes rect.draft").count() > 0 < await page.locator("#lanes rect.verify").count()
    assert "18446744073709551615" in await page.text_content("#numbers")
    assert await page.locator("#positions tbody tr").count() > 0


async def test_a_token_shows_its_probability_by_pointer_and_by_keys(page: Any, gate: Gate) -> None:
    await ask(page, gate, **{"max-tokens": "20"})
    await answered(page)
    await page.click(".show-tokens")
    await page.hover(".tokens .token >> nth=4")
    by_pointer = await page.text_content("#token")
    await page.focus(".tokens")
    await page.keyboard.press("Home")
    for _ in range(4):
        await page.keyboard.press("ArrowRight")
    assert await page.text_content("#token") == by_pointer
    assert "logprob -0.500" in by_pointer and await page.locator("#token tbody tr").count() >= 1


async def test_both_sides_of_a_comparison_are_equal(page: Any, make_gate: MakeGate) -> None:
    gate = await make_gate(step_s=0.005)
    await visit(page, gate)
    await page.check("#compare")
    await fill(page, temperature="0.8")
    await send(page, "on the")
    await page.wait_for_selector(".outcome", timeout=60_000)
    await page.click(".show-tokens")
    assert await page.locator(".outcome.good").count() == 1
    one, other = await page.eval_on_selector_all(".tokens", "all => all.map(one => one.textContent)")
    assert one == other != ""
    plain = await page.eval_on_selector_all(".side:nth-child(2) .token", "all => all.map(one => one.className)")
    assert {name.removesuffix(" special") for name in plain} == {"token from-plain"}  # an end drawn early is special
    assert await page.locator("#lanes svg").count() == 2


async def test_a_worker_that_is_killed_shows_as_away_and_the_answer_goes_on(
    page: Any, make_gate: MakeGate, tokenizer: Any
) -> None:
    gate = await make_gate(model=talkative(tokenizer), num_verifiers=2, step_s=0.02)
    await ask(page, gate, **{"max-tokens": "200"})
    await page.wait_for_selector(".markdown .token")
    serving = next(worker for worker in gate.cluster.verifiers if worker.num_open)
    await serving.kill()
    await answered(page)
    await page.click(".show-tokens")
    assert await page.locator(".tokens .token").count() == 200
    await page.wait_for_selector(".state-away", timeout=10_000)
    assert await page.locator(".state-ready").count() == 2


async def test_a_conversation_continues_and_stops_on_request(page: Any, make_gate: MakeGate, tokenizer: Any) -> None:
    gate = await make_gate(model=talkative(tokenizer), step_s=0.02)
    await ask(page, gate, **{"max-tokens": "8", "system": "the"})
    await answered(page)
    await fill(page, **{"max-tokens": "1000"})
    await send(page, "on the")
    await page.wait_for_selector(".sides >> nth=1 >> .token", state="attached")
    await page.click("#stop")
    await answered(page)
    await gate.cluster.until_idle()
    await page.click("#clear")
    assert await page.locator(".token").count() == 6  # the legend's


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("json_object", "", {"json_object": True}),
        ("json_schema", '{"type": "object"}', {"json_schema": '{"type": "object"}'}),
        ("regex", "on .*", {"regex": "on .*"}),
        ("choice", "on\noff\n", {"choice": {"texts": ["on", "off"]}}),
    ],
)
async def test_an_answer_can_be_constrained(
    page: Any, make_gate: MakeGate, kind: str, text: str, expected: dict[str, Any]
) -> None:
    gate = await make_gate(verify_hellos=[{"supports_constraints": True}])
    await visit(page, gate)
    await page.click("#show-settings")
    await page.select_option("#constraint-kind", kind)
    assert await page.is_visible("#constraint") == bool(text)
    if text:
        await page.fill("#constraint", text)
    await send(page, "on the")
    await answered(page)
    assert gate.cluster.verifiers[0].opened[-1].constraint == Constraint(**expected)


async def test_a_refusal_is_reported(page: Any, gate: Gate) -> None:
    await ask(page, gate, **{"top-p": "2"})
    await page.wait_for_selector("#fault:not(:empty)")
    assert "top_p" in await page.text_content("#fault")


@pytest.mark.parametrize(("theme", "width"), covering(["light", "dark"], [1280, 360], strength=1))
async def test_it_is_usable_without_sight_or_in_the_dark_or_on_a_phone(
    page: Any, gate: Gate, theme: str, width: int
) -> None:
    await page.emulate_media(color_scheme=theme)
    await page.set_viewport_size({"width": width, "height": 800})
    await ask(page, gate, **{"max-tokens": "20"})
    await answered(page)
    await page.hover(".markdown .token >> nth=4")
    found = await axe.Axe().run(page)
    serious = [fault for fault in found.response["violations"] if fault["impact"] in ("serious", "critical")]
    assert not serious, [(fault["id"], [node["html"] for node in fault["nodes"]]) for fault in serious]
    assert await page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


async def test_the_page_may_load_nothing_from_elsewhere_and_can_be_left_out(make_gate: MakeGate) -> None:
    gate = await make_gate()
    reply = await gate.http.get("/")
    assert reply.headers["content-security-policy"].startswith("default-src 'self'")
    for name in ("main.js", "base.css", "icon.svg", "third_party/purify.es.mjs"):
        assert (await gate.http.get(f"/page/{name}")).status_code == 200
    for name in ("..%2fapp.py", "%2e%2e%2f__main__.py", "none.js", "index", "third_party/README.md", "%00"):
        assert (await gate.http.get(f"/page/{name}")).status_code == 404
    without = await make_gate(gateway={"page": False})
    assert (await without.http.get("/")).status_code == 404
