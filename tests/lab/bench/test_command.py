"""Bad options end a benchmark with one line and status 2, not with a traceback or the status of a failed comparison."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from betoken.bench import identity, router_overhead, step  # noqa: E402
from betoken.bench.command import exit_status  # noqa: E402
from betoken.bench.drafters_options import parse_options as drafters_options  # noqa: E402
from betoken.bench.prefix_caching import parse_options as prefix_caching_options  # noqa: E402
from betoken.client import UnavailableError  # noqa: E402
from betoken.engine.errors import ModelRefusedError  # noqa: E402

PAIR = ["--target", "t", "--draft", "d"]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (identity.main, [*PAIR, "--limit", "0"]),
        (prefix_caching_options, [*PAIR, "--limit", "0"]),
        (drafters_options, [*PAIR, "--temperature", "nan"]),
        (identity.main, [*PAIR, "--max-new-tokens", "0"]),
        (router_overhead.main, ["--streams", "0"]),
        (step.main, ["--rows", "0"]),
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
    assert capsys.readouterr().err.startswith("python -m betoken.bench.identity: ")


@pytest.mark.parametrize("error", [UnavailableError("gone"), ModelRefusedError("no such model")], ids=repr)
def test_an_error_of_a_service_or_a_model_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> int:
        raise error

    assert exit_status("betoken.bench.example", body) == 2
    assert capsys.readouterr().err == f"python -m betoken.bench.example: {error}\n"


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT raises, though tests may run in a shell's background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("kept", "rest"), [(None, ""), (Path("runs"), "; what was measured is kept in runs")], ids=str)
def test_an_interruption_is_one_line_that_says_what_is_kept(
    kept: Path | None, rest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure() -> int:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(10)
        return 0

    assert exit_status("betoken.bench.example", lambda: asyncio.run(measure()), kept) == 130
    assert capsys.readouterr().err == f"python -m betoken.bench.example: interrupted{rest}\n"
