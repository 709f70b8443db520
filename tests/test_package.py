"""Content and metadata of the two wheels: the SDK's is small, each file is in exactly one of them."""

import re
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = {"betoken": ROOT, "betoken-server": ROOT / "server"}
STAY = {"lab"}
"""Roots that no wheel holds: they work on a checkout."""


class Wheel:
    """Content of a wheel of these sources."""

    def __init__(self, project: Path, folder: Path) -> None:
        build = "import sys; from hatchling.builders.wheel import WheelBuilder\n"
        build += "print(*WheelBuilder(sys.argv[1]).build(directory=sys.argv[2], versions=['standard']))"
        command = [sys.executable, "-c", build, str(project), str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        with zipfile.ZipFile(done.stdout.strip()) as archive:
            names = set(archive.namelist())
            (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
            self.metadata: Message = Parser().parsestr(archive.read(metadata).decode())
            self.licenses = [archive.read(name).decode() for name in names if "/licenses/" in name]
        self.files = {name for name in names if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("wheels")
    return SimpleNamespace(sdk=Wheel(ROOT, folder), services=Wheel(ROOT / "server", folder))


def sources() -> dict[str, Path]:
    """Name in a wheel -> file, of all below `<root>/betoken/` of the roots that are shipped."""
    paths = [path for path in ROOT.glob("*/betoken/**/*") if path.is_file() and path.suffix != ".pyc"]
    shipped = [path for path in paths if path.relative_to(ROOT).parts[0] not in STAY]
    return {"/".join(path.relative_to(ROOT).parts[1:]): path for path in shipped}


def test_the_sdk_alone_carries_no_service_no_kernel_and_no_benchmark(wheels: SimpleNamespace) -> None:
    packages = {name.split("/")[1] for name in wheels.sdk.files}
    assert packages == {"v1", "common", "client", "cli", "loadtest", "testing"}
    assert {Path(name).suffix for name in wheels.sdk.files} <= {".py", ".pyi", ".proto", ".typed"}
    assert not [name for name in wheels.sdk.files if name.endswith(".py") and "triton" in sources()[name].read_text()]


def test_every_source_is_in_exactly_one_wheel(wheels: SimpleNamespace) -> None:
    assert wheels.sdk.files & wheels.services.files == set()
    assert wheels.sdk.files | wheels.services.files == set(sources())


def test_both_wheels_are_of_one_release(wheels: SimpleNamespace) -> None:
    from betoken.client import __version__

    assert {wheel.metadata["Version"] for wheel in (wheels.sdk, wheels.services)} == {__version__}
    needs = wheels.services.metadata.get_all("Requires-Dist")
    assert {re.split("[;]", need)[0].strip() for need in needs} == {
        f"betoken=={__version__}",
        f"betoken[gateway]=={__version__}",
        f"betoken[router]=={__version__}",
        f"betoken[worker]=={__version__}",
    }


@pytest.mark.parametrize("name", ["sdk", "services"])
def test_a_wheel_says_what_a_package_index_shows(name: str, wheels: SimpleNamespace) -> None:
    wheel = getattr(wheels, name)
    assert wheel.licenses == [(ROOT / "LICENSE").read_text()]
    assert wheel.metadata["License-Expression"] == "Apache-2.0" and wheel.metadata["Requires-Python"] == ">=3.11"
    for field in ("Summary", "Author", "Keywords", "Classifier"):
        assert wheel.metadata[field], field
    page = wheel.metadata.get_payload()
    assert "```" in page or "|" in page
    relative = [target for target in re.findall(r"\]\(([^)]+)\)", page) if not target.startswith("https://")]
    assert not relative, "a package index has no such files"


def test_development_tools_are_requested_by_name() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["all"] == ["betoken[cli,gateway,router,worker]"]
    assert any(line.startswith("pytest") for line in extras["dev"])
    assert "-e '.[all,dev]'" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("project", PROJECTS.values(), ids=PROJECTS)
def test_too_old_a_python_is_reported_before_anything_else(project: Path) -> None:
    """pip would complain of dependencies first, which it resolves before it reads our metadata."""
    code = "from hatchling.metadata.core import ProjectMetadata; from hatchling.plugin.manager import PluginManager\n"
    code += "import sys; sys.version_info = (3, 10, 13, 'final', 0)\n"
    code += "print(ProjectMetadata(sys.argv[1], PluginManager()).core.name)"
    command = [sys.executable, "-c", code, str(project)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "Betoken needs Python 3.11 or newer, this is 3.10\n")
