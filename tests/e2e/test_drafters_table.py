"""The drafter table through real processes: measured in pieces, and by its command."""

import json
from pathlib import Path

import pytest

from betoken.bench import drafters_runner
from betoken.bench.baseline import BASELINE_NAMES
from betoken.bench.drafters import main
from betoken.bench.drafters_options import parse_options
from betoken.bench.drafters_report import summarize
from betoken.bench.drafters_runner import DraftersRunner
from betoken.bench.drafters_store import DraftersStore
from betoken.bench.prompts import load_prompts
from betoken.bench.sides import HOSTED
from tests.e2e.pair import EMBEDDED

MAX_NEW_TOKENS = 24
ENDING = "if __name__ == '__main__':\n    main()\n"
"""Text after which the embedded target ends."""


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.asyncio(loop_scope="session")
async def test_the_drafter_table_does_not_measure_a_finished_piece_again(
    stack, tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    records = {"prompt": ENDING}, {"turns": [prompts[1], "more"], "category": "qa"}, {"prompt": "x = 1\n" * 2000}
    file = write(tmp_path / "some.jsonl", *records)
    command = ["--target", "t", "--draft", "d", "--prompts", str(file), "--drafters", "ngram,model"]
    command += ["--max-new-tokens", str(MAX_NEW_TOKENS), "--no-transformers"]
    for limit in (["--minutes", "0"], []):  # one prompt, then the rest
        options = parse_options([*command, *limit])
        store = DraftersStore.open_for(tmp_path / "out", options.decisive(), {})
        await DraftersRunner(options, {HOSTED: stack}, None, store).run({file.name: load_prompts(file)})
    assert "2 prompts, 1 measured already" in capsys.readouterr().err
    result = summarize(DraftersStore.open(tmp_path / "out"))
    sizes = [(group["category"], group["num_prompts"], group["num_left_out"]) for group in result["groups"]]
    assert sizes == [("code", 1, 1), ("qa", 1, 0), ("all", 2, 1)]
    assert (result["identical"], result["compared"]) == (4, 4)
    assert all(group["num_tokens"] == group["num_prompts"] * MAX_NEW_TOKENS for group in result["groups"])


@pytest.mark.timeout(900)
def test_the_drafter_table_command_measures_two_workers_and_transformers(
    pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafters_runner, "TRIAL_TOKENS", 4)  # by which the threads of transformers are chosen
    for name in ("BETOKEN_DRAFT_TIMEOUT_S", "BETOKEN_FIRST_DRAFT_TIMEOUT_S"):
        monkeypatch.setenv(name, "60")  # drafters that pause are waited for
    sides = ["ngram", "ngram/max_branches=1", "early_exit/--early-exit-layers=1"]
    file = write(tmp_path / "some.jsonl", {"prompt": ENDING})
    command = ["--target", pair.target, "--draft", pair.draft, "--prompts", str(file), "--out", str(tmp_path / "out")]
    command += ["--drafters", ",".join(sides), "--max-new-tokens", str(MAX_NEW_TOKENS)]
    assert main([*command, "--dtype", "float32", "--compile", "off"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Each drafter with plain decoding, and that with `generate()`, which float32 makes comparable.
    assert result["compared"] == result["identical"] + result["near_ties"] == len(sides) + 1
    (group,) = result["groups"]
    assert {side["side"] for side in group["sides"]} == {"none", *sides, *BASELINE_NAMES.values()}
    assert all(side["drafting_ms"] > 0 for side in group["sides"] if side["side"] in sides)
    (run,) = (json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines())
    assert {side["num_tokens"] for side in run["runs"].values()} == {MAX_NEW_TOKENS}
    assert main(["--report", "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result


@pytest.mark.slow
def test_the_drafter_table_command_measures_attached_drafters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sides = ["ngram@attached", "medusa", "eagle3", "fused@attached"]
    file = write(tmp_path / "some.jsonl", {"prompt": ENDING})
    command = ["--target", str(EMBEDDED / "target"), "--draft", str(EMBEDDED / "draft"), "--prompts", str(file)]
    command += ["--medusa", str(EMBEDDED / "medusa"), "--eagle3", str(EMBEDDED / "eagle3"), "--no-transformers"]
    command += ["--drafters", ",".join(sides), "--max-new-tokens", str(MAX_NEW_TOKENS), "--compile", "off"]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["compared"] == result["identical"] == len(sides)
    assert {side["side"] for side in result["groups"][0]["sides"]} == {"none", *sides}
