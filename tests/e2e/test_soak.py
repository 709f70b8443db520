"""A minute of faults next to healthy streams; ten and more are `python -m betoken.bench.soak MINUTES`."""

import json
import subprocess
import sys

import pytest

from betoken.bench.soak.__main__ import is_well

WELL = {"answers_compared": 3, "answers_equal": 3, "answers_failed": 0, "service_faults": []} | {
    "everything_free": True,
    "growth": [],
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_healthy_streams_notice_nothing_of_a_minute_of_faults() -> None:
    command = [sys.executable, "-m", "betoken.bench.soak", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=580)
    report = json.loads(result.stdout.splitlines()[-1])
    assert result.returncode == 0, report
    assert report["answers_compared"] == report["answers_equal"] > 3
    assert report["faults_injected"] > 10 and report["ahead_hits"] > 10
    assert report["http_answers_compared"] > 3 and not report["growth"]


@pytest.mark.parametrize(
    "found",
    [
        {"answers_equal": 2},
        {"answers_compared": 0, "answers_equal": 0},
        {"answers_failed": 1},
        {"service_faults": ["INTERNAL"]},
        {"everything_free": False},
        {"growth": ["gateway: threads 9 -> 99"]},
    ],
)
def test_any_finding_fails_a_soak(found: dict[str, object]) -> None:
    assert is_well(WELL)
    assert not is_well(WELL | found)
