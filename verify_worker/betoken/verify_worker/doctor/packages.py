"""Python and the installed packages, compared with the versions that Betoken declares. It imports none of them."""

import sys
from collections.abc import Callable, Sequence
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from betoken.common.release import how_to_install
from betoken.verify_worker.doctor.finding import Finding, error, ok, warning

_PACKAGE = "betoken"
_EXTRA = "worker"
_SHOWN = ("torch", "transformers", "triton", "grpcio")
"""Packages whose versions are shown if all are right."""


def python_finding(version: Sequence[object] = tuple(sys.version_info), requirement: str | None = None) -> Finding:
    """Compare Python's version with the declared one.

    Args:
        requirement: such as ">=3.11"; None = the installed distribution's.
    """
    if requirement is None:
        requirement = _metadata()["Requires-Python"]
    shown = ".".join(map(str, version[:3]))
    if SpecifierSet(requirement).contains(shown):
        return ok("python", shown)
    return error("python", f"{shown}, not {requirement}", f"create the virtual environment with Python {requirement}")


def packages_finding(
    requirements: Sequence[str] | None = None,
    version_of: Callable[[str], str] = metadata.version,
    on_gpu: bool = False,
) -> Finding:
    """Compare installed versions with the declared ones.

    Args:
        requirements: lines of the metadata; None = the installed distribution's.
        version_of: returns the version of a package or raises `PackageNotFoundError`.
        on_gpu: whether kernels of Triton are used.
    """
    faults: dict[str, str] = {}
    shown: dict[str, str] = {}
    for line in _metadata().get_all("Requires-Dist", []) if requirements is None else requirements:
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": _EXTRA}):
            continue
        fault, version = _fault(requirement, version_of)
        (faults if fault else shown)[requirement.name] = fault or version
    if not faults:
        return ok("packages", ", ".join(f"{name} {shown[name]}" for name in _SHOWN if name in shown))
    level = warning if set(faults) == {"triton"} and not on_gpu else error  # a CPU runs no Triton kernel
    return level("packages", "; ".join(faults.values()), how_to_install(_EXTRA))


def _fault(requirement: Requirement, version_of: Callable[[str], str]) -> tuple[str, str]:
    """Return the fault of a package, empty if it has none, and its version."""
    name, specifier = requirement.name, requirement.specifier
    try:
        version = version_of(name)
    except metadata.PackageNotFoundError:
        return f"{name} is not installed, {specifier} is needed", ""
    is_right = specifier.contains(version, prereleases=True)
    return "" if is_right else f"{name} {version}, not {specifier}", version


def _metadata() -> metadata.PackageMetadata:
    return metadata.metadata(_PACKAGE)
