"""`make`: what it installs for which target, and an error for a Python that is too old."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import requires
from pathlib import Path

import pytest

from tests.import_graph import FILES, ROOT, imports_of, module_files, nearest


@pytest.mark.parametrize(
    ("target", "extras"), [("demo", "all"), ("up", "all"), ("chat", "all"), ("test", "all,dev"), ("lint", "all,dev")]
)
def test_development_tools_are_installed_for_checks_only(target: str, extras: str, tmp_path: Path) -> None:
    command = ["make", "-n", "-C", str(ROOT), f"VENV={tmp_path / 'venv'}", target]
    planned = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert re.findall(r"-e '\.\[(.*)\]'", planned)[-1] == extras


def test_the_demo_and_its_services_import_no_development_tool() -> None:
    modules = {name: path for package in {owner for owner, _ in FILES} for name, path in module_files(package)}
    left = ["betoken.bench.identity", "betoken.bench.drafters"]
    left += [name for name in modules if name.split(".")[1] not in ("bench", "testing", "training")]
    seen, imported = set(left), set()
    while left:
        for _, name in imports_of(modules[left.pop()]):
            module = nearest(name, modules)
            imported.add(name.split(".")[0])
            if module is not None and module not in seen:
                seen.add(module)
                left.append(module)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {re.split(r"[>=;\[ ]", line)[0] for line in extras[extra]} for extra in extras}
    tools = names["dev"] - names["gateway"] - names["cli"] - names["router"] - names["worker"]
    assert imported & {tool.replace("-", "_") for tool in tools} == {"psutil"}
    assert any(line.startswith("psutil") for line in requires("accelerate") or ()), "it comes with an extra's package"


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
