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
    folders = ["ngram", str(tmp_path / "medusa"), str(tmp_path / "eagle3"), str(tiny_pair / "target")]
    options = ["--target", str(tiny_pair / "target"), "--drafter", *folders, "--threads", "1", "--limit", "3"]
    options += ["--prompts", str(tiny_pair / "prompts.jsonl"), "--answers", str(tmp_path / "answers.jsonl")]
    capsys.readouterr()
    measure.main([*options, "--max-new-tokens", "13", "--device", "cpu"])
    out = capsys.readouterr().out
    found = re.findall(r"\| ((?:tree|chain) of \d+) \| (\d\.\d\d) \| ([\d., ]*) ?\|", out)
    assert [name for name, _, _ in found[:3]] == ["tree of 8", "tree of 16", "tree of 32"]
    assert len(found) == 3 + 5 + (7 + 3) + 1
    for _, tokens, shown in found:
        shares = [float(share) for share in shown.split(", ") if share]
        drafted = float(tokens) - 1  # what is accepted beyond the positions shown is missing
        assert (
            drafted >= sum(shares) - 0.05
            if len(shares) == measure.MAX_SHOWN
            else drafted == pytest.approx(sum(shares), abs=0.05)
        )
    assert float(found[-1][1]) > 5.5  # 12 tokens after the first, in two rounds of up to six, as products agree
