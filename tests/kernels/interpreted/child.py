"""Runs the files of tests it is sent and writes their reports to standard output, one JSON line each; started by
`conftest`."""

import json
import os
import sys
from typing import TextIO

import pytest


class Reporter:
    """Writes every report of a test as it comes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def pytest_configure(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._stream.write(json.dumps(data) + "\n")


def main() -> None:
    """Run the tests of each argument file named by a line of standard input; write `null` after the last of each."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what pytest and the tests print is for the parent's complaint, should there be one
    # The parent has selected already: no marker expression of the project's own.
    options = [
        "-o",
        "addopts=",
        "-q",
        "--import-mode=importlib",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:langsmith_plugin",
        "-p",
        "no:schemathesis",
    ]
    options += ["--timeout=240"]  # less than the parent's, which waits for the report of a test that hangs
    for line in sys.stdin:
        pytest.main([*options, f"@{line.rstrip()}"], plugins=[Reporter(stream)])
        stream.write("null\n")


if __name__ == "__main__":
    main()
