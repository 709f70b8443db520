"""The drafter table through real processes, interrupted and resumed."""

import json
from pathlib import Path

import pytest

from foretoken.bench.baseline import BASELINE_NAMES
from foretoken.bench.drafters import main
from foretoken.bench.matrix import DRAFTERS

MAX_NEW_TOKENS = 24


@pytest.mark.timeout(900)
def test_a_table_in_two_pieces(pair, tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.jsonl"
    ending = "if __name__ == '__main__':\n    main()\n"  # what the embedded target ends the text after
    records = [{"prompt": ending}, {"turns": [prompts[1], "more"], "category": "qa"}, {"prompt": "x = 1\n" * 2000}]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    arguments = ["--target", pair.target, "--draft", pair.draft, "--prompts", str(file), "--out", str(tmp_path / "out")]
    arguments += ["--max-new-tokens", str(MAX_NEW_TOKENS), "--dtype", "float32", "--compile", "off"]

    assert main([*arguments, "--minutes", "0"]) == 0  # one prompt, whatever it takes
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert first["num_prompts"] == 1

    assert main([*arguments]) == 0
    printed = capsys.readouterr()
    assert "2 prompts, 1 measured already" in printed.err
    result = json.loads(printed.out.splitlines()[-1])
    assert [(group["category"], group["num_prompts"]) for group in result["groups"]] == [
        ("code", 1),
        ("qa", 1),
        ("all", 2),
    ]
    assert result["groups"][0]["num_left_out"] == 1
    # Each drafter with plain decoding, and that with `generate()`, which float32 makes comparable.
    assert result["compared"] == 2 * (len(DRAFTERS) + 1)
    assert result["identical"] + result["near_ties"] == result["compared"]
    for group in result["groups"]:
        assert [side["side"] for side in group["sides"]] == ["none", *DRAFTERS, *BASELINE_NAMES.values()]
        assert group["num_tokens"] == group["num_prompts"] * MAX_NEW_TOKENS
        assert all(side["drafting_ms"] > 0 for side in group["sides"] if side["side"] in DRAFTERS)
    runs = [json.loads(line) for line in (tmp_path / "out" / "runs.jsonl").read_text().splitlines()]
    assert {side["num_tokens"] for run in runs for side in run["runs"].values()} == {MAX_NEW_TOKENS}

    assert main(["--report", "--out", str(tmp_path / "out")]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
