"""The page of the HTTP door names every field that bodies have or refuse, and its examples are programs."""

import ast
import re
from pathlib import Path

from betoken.gateway.app import create_app
from betoken.gateway.body import Extension
from betoken.gateway.chat import ChatBody
from betoken.gateway.completions import CompletionBody
from betoken.gateway.settings import GatewaySettings

PAGE = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


def table(title: str) -> list[list[str]]:
    part = PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0]
    return [line.strip("|").split("|") for line in part.splitlines() if line.startswith("| `")]


def test_the_table_names_every_field() -> None:
    for body, letter in ((CompletionBody, "C"), (ChatBody, "H")):
        named = {name for row in table("Fields") if letter in row[1] for name in re.findall(r"`(\w+)`", row[0])}
        fields = {*body.model_fields, *body.refused}
        assert fields <= named, fields - named
    every = {name for row in table("Fields") for name in re.findall(r"`(\w+)`", row[0])}
    bodies = (CompletionBody, ChatBody)
    assert every == {name for body in bodies for name in (*body.model_fields, *body.refused)}
    assert all(f"`{name}`" in PAGE for name in Extension.model_fields)


def test_the_table_names_every_endpoint() -> None:
    app = create_app(None, GatewaySettings())  # type: ignore[arg-type]
    paths = {re.sub(r"\{.*", "ID", path) for path in app.openapi()["paths"]}
    assert paths <= set(re.findall(r"(?:GET|POST) (/[\w./]*)", PAGE)) | {"/"}


def test_python_in_the_page_is_python() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    assert len(blocks) == 2
    for block in blocks:
        ast.parse(block)
