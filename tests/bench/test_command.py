"""Bad options end a benchmark with one line and status 2, not with a traceback and that of a failed comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from foretoken.bench import demo, identity, router_overhead  # noqa: E402
from foretoken.bench.command import exit_status  # noqa: E402
from foretoken.bench.drafters_options import parse_options as drafters_options  # noqa: E402
from foretoken.bench.end_to_end_options import parse_options as end_to_end_options  # noqa: E402
from foretoken.bench.prefix_caching import parse_options as prefix_caching_options  # noqa: E402
from foretoken.client import UnavailableError  # noqa: E402

PAIR = ["--target", "t", "--draft", "d"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (identity.main, [*PAIR, "--limit", "0"]),
        (prefix_caching_options, [*PAIR, "--limit", "0"]),
        (end_to_end_options, [*PAIR, "--temperature", "-1"]),
        (drafters_options, [*PAIR, "--temperature", "nan"]),
        (demo.main, [*PAIR, "--repeats", "0"]),
        (router_overhead.main, ["--streams", "0"]),
        (router_overhead.main, ["--step-ms", "-5"]),
    ],
)
def test_values_out_of_range_are_named(
    command: Callable[[list[str]], object], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(arguments)
    assert ended.value.code == 2
    assert f"argument {arguments[-2]}: {arguments[-1]} is not" in capsys.readouterr().err


def test_files_that_are_not_there_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert identity.main([*PAIR, "--prompts", str(tmp_path / "absent.jsonl"), "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("python -m foretoken.bench.identity: ")


def test_an_error_of_a_service_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        raise UnavailableError("gone")

    assert exit_status("foretoken.bench.example", body) == 2
    assert capsys.readouterr().err == "python -m foretoken.bench.example: gone\n"
