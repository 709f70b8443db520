"""A benchmark that has nothing to measure says so; it does not pass."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import pytest

from betoken.bench import drafters, prefix_caching


class NarrowStack:
    """Services with a context that no prompt fits."""

    def __init__(self, config: Any) -> None:
        self.client = self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop nothing."""

    async def model_info(self) -> None:
        """Knows no model."""

    async def fitting(self, prompts: Sequence[Any], max_new_tokens: int, file: Any = None) -> list[Any]:
        return []


@pytest.mark.parametrize("drafter", ["model", "staged", "fused"])
def test_a_drafter_without_the_model_it_needs_is_refused(drafter: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        prefix_caching.parse_options(["--target", "t", "--drafter", drafter])
    assert f"--drafter {drafter} needs --draft" in capsys.readouterr().err


def test_the_drafter_table_without_work_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drafters, "Stack", NarrowStack)
    monkeypatch.setattr(drafters, "open_source", lambda *which: SimpleNamespace(fingerprint=lambda: "f"))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    options = ["--target", "t", "--draft", "d", "--prompts", str(prompts), "--out", str(tmp_path / "out")]
    assert drafters.main([*options, "--drafters", "ngram", "--no-transformers"]) == 2
    assert "no prompt fits" in capsys.readouterr().err
    assert drafters.main([*options, "--report"]) == 2  # of the folder that was made and is empty
    assert "holds no measurements" in capsys.readouterr().err
