"""The architecture page states how many files a round executes, counted from the calls of real rounds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = Path(__file__).with_name("round_files.py")


@pytest.mark.slow
def test_the_architecture_page_states_the_number_of_files_that_a_round_executes(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(CHILD), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    (stated,) = re.findall(r"executes code of (\d+) files", (ROOT / "docs" / "architecture.md").read_text())
    assert int(stated) - 5 <= len(done.stdout.split()) <= int(stated)
