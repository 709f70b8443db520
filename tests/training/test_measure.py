import re
from pathlib import Path

import pytest

from betoken.training import measure
from betoken.training.__main__ import main


def test_every_drafter_is_measured_and_the_target_foresees_itself(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = ["--target", str(tiny_pair / "target"), "--texts", str(tiny_pair / "texts.jsonl"), "--max-length", "64"]
    shared += ["--num-held-out", "2", "--batch-rows", "4", "--tokens", "200", "--threads", "1", "--device", "cpu"]
    for name in ("medusa", "eagle3"):
        main([name, *shared, "--out", str(tmp_path / name), "--run-dir", str(tmp_path / f"{name}_run")])
    folders = [str(tmp_path / "medusa"), str(tmp_path / "eagle3"), str(tiny_pair / "target")]
    options = ["--target", str(tiny_pair / "target"), "--drafter", *folders, "--threads", "1", "--limit", "3"]
    options += ["--prompts", str(tiny_pair / "prompts.jsonl"), "--answers", str(tmp_path / "answers.jsonl")]
    capsys.readouterr()
    measure.main([*options, "--max-new-tokens", "13"])
    out = capsys.readouterr().out
    assert "tree of 64" in out and "chain of 7" in out
    values = [float(value) for line in out.splitlines() for value in re.findall(r" (\d\.\d\d) ", line)]
    assert len(values) == 5 + 7 + 1 and min(values) >= 1.0
    assert values[-1] > 5.5  # 12 tokens after the first, in two rounds of up to six, as far as products agree
