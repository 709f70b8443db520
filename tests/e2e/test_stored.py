"""Targets stored in few bits through real services, with every drafter: tokens of `generate()` on their numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from betoken.bench.identity import main
from betoken.bench.matrix import DRAFTERS
from betoken.bench.stored_targets import STORED
from tests.engine.gguf_files import write_gguf

IN_HALVES = ["bfloat16-t0.8-ngram@attached-k4-c8"]
CELLS = [*(f"float32-t0-{name}-k4-c8" for name in DRAFTERS if name != "grammar"), *IN_HALVES]
OF_LAYERS = ["float32-t0-early_exit-k4-c8"]
"""Cells whose drafts come from quantized layers; other drafters see tokens only."""


def run(stored: str, target: str, draft: str, folder: Path, cells: list[str], *more: str) -> Any:
    arguments = ["--target", target, "--stored", stored, "--draft", draft, "--out", str(folder / "results")]
    return main([*arguments, "--max-new-tokens", "16", "--compile", "off", "--cells", *cells, *more])


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stored", "cells"),
    [
        *(pytest.param(name, [*OF_LAYERS, *IN_HALVES] if name == "w4a16" else OF_LAYERS, id=name) for name in STORED),
        *(pytest.param(name, CELLS, id=f"{name}-all", marks=pytest.mark.slow) for name in STORED),
    ],
)
def test_no_drafter_changes_tokens_of_a_quantized_target(
    stored: str, cells: list[str], pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if stored.startswith("gguf"):
        path = write_gguf(tmp_path / "tiny.gguf", "Q4_1")
        prompts = tmp_path / "prompts.jsonl"
        prompts.write_text("".join(json.dumps({"prompt": f"in {n} in 12{n} in"}) + "\n" for n in range(4)))
        status = run(stored, path, path, tmp_path, cells, "--prompts", str(prompts))
    else:
        status = run(stored, pair.target, pair.draft, tmp_path, cells, "--limit", "4")
    output = capsys.readouterr().out
    summary = json.loads(output.splitlines()[-1])
    assert status == 0, output
    assert summary["compared"] == 4 * len(cells) and summary["failed"] == 0 and summary["are_pages_free"]
    assert summary["stored"] == stored


def test_a_gguf_name_takes_a_gguf_file(pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("gguf-q4_1", pair.target, pair.draft, tmp_path, CELLS) == 2
    assert "takes a GGUF file with blocks of Q4_1" in capsys.readouterr().err
