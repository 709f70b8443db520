"""A GGUF file through real services: the tokens of `generate()` on the numbers it stands for, and a chat with it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from betoken.bench.identity import main
from tests.engine.gguf_files import write_gguf

CELLS = [
    "float32-t0-none-k0-c1",
    "float32-t0-ngram-k4-c8",
    "float32-t0-model-k4-c8",
    "bfloat16-t0.8-ngram-k4-c8",
    "bfloat16-t0-model-k4-c1",
]


@pytest.mark.timeout(600)
# Every drafter is tried on Q4_1 in `test_stored`.
@pytest.mark.parametrize(
    "type_name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("Q4_1", "IQ2_XS", "IQ4_XS")), "Q6_K"]
)
def test_tokens_of_a_gguf_file_equal_the_dequantized_models(
    type_name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", type_name)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"in {n} in 12{n} in"}) + "\n" for n in range(4)))
    arguments = ["--target", path, "--draft", path, "--prompts", str(prompts), "--max-new-tokens", "24"]
    status = main([*arguments, "--compile", "off", "--out", str(tmp_path / "out"), "--cells", *CELLS])
    output = capsys.readouterr().out
    summary = json.loads(output.splitlines()[-1])
    assert status == 0, output
    # Drafts in bfloat16 have separate references.
    assert summary["compared"] == 4 * len(CELLS) and summary["failed"] == 0 and summary["are_pages_free"]


@pytest.mark.timeout(300)
def test_a_chat_serves_a_gguf_file_and_answers_each_line_of_its_input(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    options = ["--model", path, "--compile", "off", "--max-new-tokens", "8", "--temperature", "0"]
    command = [sys.executable, "-m", "betoken.cli", "chat", *options]
    asked = "in in\n\nand\n/exit\nnot asked\n"
    done = subprocess.run(command, input=asked, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("> ")] == ["> in in", "> and"]
