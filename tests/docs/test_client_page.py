"""Every recipe of the client's page runs unchanged, against a router over workers without a model."""

import asyncio
import re
from pathlib import Path

import pytest

from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import CHAT_TEMPLATE, byte_tokenizer_json, running_cluster

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "client.md").read_text()
RECIPES = {
    title: re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)
    for title, text in re.findall(r"^## \d+\. (.*?)$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
}
ADDRESS = "127.0.0.1:50051"


def test_there_are_ten_recipes_with_code_each():
    assert len(RECIPES) == 10
    assert all(RECIPES.values())


@pytest.mark.parametrize("title", [title for title, blocks in RECIPES.items() if blocks[0][0] == "python"])
async def test_the_recipe_runs(title, capsys):
    tokenizer = Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")
    async with running_cluster(tokenizer, step_s=0.004) as cluster:
        for _, code in RECIPES[title]:
            program = compile(code.replace(ADDRESS, cluster.address), title, "exec")
            await asyncio.to_thread(exec, program, {"__name__": "__main__"})
        await cluster.until_idle()


def test_what_is_shown_of_another_language_is_part_of_its_example():
    (block,) = RECIPES["Another language"]
    assert block[0] == "js"
    assert block[1] in (ROOT / "examples" / "node" / "client.mjs").read_text()


def test_every_error_of_the_sdk_is_in_the_table():
    from betoken.common import errors

    classes = {name for name, cls in vars(errors).items() if isinstance(cls, type) and issubclass(cls, Exception)}
    assert classes - {"BetokenError"} - {"UnimplementedError"} <= set(re.findall(r"`(\w+Error)`", PAGE))
