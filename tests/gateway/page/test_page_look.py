"""Layout and content of the chat page: fields, phones, Markdown, and third-party files."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from betoken.gateway.pages import FOLDER
from tests.gateway.conftest import Gate, MakeGate
from tests.gateway.page.browser import answered, ask, saying, texts, visit

pytestmark = pytest.mark.asyncio(loop_scope="module")
MIN_FIELD_PX = 110
ATTACKS = [
    "<script>window.attacked = 1</script>",
    '<img src="x" onerror="window.attacked = 1">',
    "[a link](javascript:window.attacked=1)",
    '![image](http://192.0.2.1/"onerror="window.attacked=1)',
    '```"><img/src=x/onerror=window.attacked=1>\ncode\n```',
    '<svg onload="window.attacked = 1"></svg>',
]
WIDE = (
    "A table and code:\n\n```\n"
    + "word " * 60
    + "\n```\n\n|"
    + " column |" * 20
    + "\n|"
    + "-|" * 20
    + "\n\n"
    + "w" * 200
)
MEASURE = """all => all.map(one => {
  const style = getComputedStyle(one), context = document.createElement("canvas").getContext("2d");
  context.font = style.font;
  const shown = one.tagName === "SELECT" ? one.selectedOptions[0].text : one.tagName === "INPUT" ? one.placeholder : "";
  const arrow = one.tagName === "SELECT" ? 20 : 0;
  const room = one.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight) - arrow;
  return [one.id, one.getBoundingClientRect().width, room - context.measureText(shown).width];
})"""


@pytest.mark.parametrize("width", [390, 1280, 1920])
async def test_every_settings_field_can_be_read(page: Any, gate: Gate, width: int) -> None:
    await page.set_viewport_size({"width": width, "height": 900})
    await visit(page, gate)
    if width < 1920:
        await page.click("#show-settings")
    await page.select_option("#constraint-kind", "json_schema")
    fields = await page.eval_on_selector_all("#settings :is(input, select, textarea)", MEASURE)
    assert len(fields) == 14
    assert not [(name, pixels) for name, pixels, _ in fields if pixels < MIN_FIELD_PX], fields
    assert not [(name, spare) for name, _, spare in fields if spare < 0], fields


@pytest.mark.parametrize("width", [320, 390, 1280])
async def test_wide_content_does_not_scroll_the_page_sideways(
    page: Any, make_gate: MakeGate, tokenizer: Any, width: int
) -> None:
    gate = await make_gate(model=saying(tokenizer, WIDE))
    await page.set_viewport_size({"width": width, "height": 800})
    await ask(page, gate)
    await answered(page)
    for element in ("document.documentElement", "document.getElementById('turns')"):
        assert await page.evaluate(f"{element}.scrollWidth <= {element}.clientWidth")
    hidden = await page.eval_on_selector_all(
        "button, textarea, input, select",
        "all => all.filter(one => one.checkVisibility() && one.getBoundingClientRect().right > innerWidth).length",
    )
    assert hidden == 0


async def test_panels_of_a_phone_open_and_close(page: Any, gate: Gate) -> None:
    await page.set_viewport_size({"width": 390, "height": 800})
    await visit(page, gate)
    for name in ("list", "measures", "settings"):
        assert not await page.is_visible(f"#{name}")
        await page.click(f"#show-{name}")
        assert await page.is_visible(f"#{name}")
        await page.keyboard.press("Escape")
    assert not await page.is_visible("#settings") and await page.is_visible("#question")


async def test_markdown_of_an_answer_is_sanitised(page: Any, make_gate: MakeGate, tokenizer: Any) -> None:
    gate = await make_gate(model=saying(tokenizer, "\n\n".join(["**Before**", *ATTACKS, "and after"])))
    await ask(page, gate)
    await answered(page)
    assert await texts(page, ".markdown strong") == ["Before"]
    assert "<script>window.attacked = 1</script>" in (await texts(page, ".markdown"))[0]
    assert (await texts(page, ".markdown p"))[-1] == "and after"
    assert await page.locator(".markdown :is(script, img, svg, iframe, [onerror], [onload])").count() == 0
    links = await page.eval_on_selector_all(".markdown a", "all => all.map(one => [one.protocol, one.rel])")
    assert {tuple(link) for link in links} == {("http:", "noopener noreferrer"), (":", "noopener noreferrer")}
    assert await page.evaluate("window.attacked") is None


async def test_markdown_has_the_colours_of_its_tokens(page: Any, make_gate: MakeGate, tokenizer: Any) -> None:
    gate = await make_gate(model=saying(tokenizer, "# On\n\nthe *moon*:\n\n1. `or`\n2. on\n\n```python\nthe = 1\n```"))
    await ask(page, gate)
    await answered(page)
    coloured = "".join(await texts(page, ".markdown .token"))
    assert "".join(coloured.split()) == "Onthemoon:oronthe=1"
    classes = "all => Object.fromEntries(all.map(one => [one.dataset.index, one.className]))"
    in_markdown = await page.eval_on_selector_all(".markdown .token", classes)
    await page.click(".show-tokens")
    in_tokens = await page.eval_on_selector_all(".tokens .token", classes)
    assert in_markdown.items() <= in_tokens.items() and len(in_markdown) > 10


def test_third_party_files_are_those_of_their_table() -> None:
    folder = FOLDER / "third_party"
    table = (folder / "README.md").read_text()
    rows = re.findall(r"^\| `(\S+)` \| .* \| (\d+\.\d+\.\d+) \| .*\[(\S+)\].* \| `(\w{64})` \|$", table, re.MULTILINE)
    assert {path.name for path in folder.iterdir()} == {"README.md"} | {
        name for row in rows for name in (row[0], row[2])
    }
    for name, version, _, digest in rows:
        content = (folder / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == digest and version in content.decode()[:300]
