"""Third-party clients: OpenAI's for Node if installed, and `llm`."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

NODE_MODULES = Path(os.environ.get("BETOKEN_NODE_MODULES", Path(__file__).parents[2] / ".venv/node/node_modules"))
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (NODE_MODULES / "openai").is_dir(),
    reason="needs node and the package openai in .venv/node or BETOKEN_NODE_MODULES",
)


async def run_node(folder: Path, script: str, *arguments: str) -> Any:
    """A script's JSON output."""
    (folder / "ask.mjs").write_text(script)
    (folder / "node_modules").symlink_to(NODE_MODULES)
    process = await asyncio.create_subprocess_exec(
        "node", str(folder / "ask.mjs"), *arguments, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0
    return json.loads(out)


def use_llm(folder: Path, monkeypatch: pytest.MonkeyPatch, url: str, model: str) -> Any:
    """The package `llm` with its OpenAI plug-in set up as its documentation has it; the model is `ours`."""
    llm = pytest.importorskip("llm")
    served = {"model_id": "ours", "model_name": model, "api_base": url, "supports_schema": True}
    text = [served, served | {"model_id": "completing", "completion": True}]
    (folder / "extra-openai-models.yaml").write_text(json.dumps(text))  # JSON is YAML
    monkeypatch.setenv("LLM_USER_PATH", str(folder))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")
    return llm
