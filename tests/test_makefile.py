"""`make` on a machine whose Python is too old."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_an_older_python_is_named_before_anything_is_made(tmp_path: Path) -> None:
    python, venv = tmp_path / "python3.10", tmp_path / "venv"
    python.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10, 9); exec(sys.argv[1])' \"$2\"\n"
    )
    python.chmod(0o755)
    command = ["make", "-C", str(ROOT), f"PYTHON={python}", f"VENV={venv}", f"{venv}/.installed"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and f"{python} is 3.10, and 3.11 or newer is needed" in result.stderr
    assert not venv.exists()
