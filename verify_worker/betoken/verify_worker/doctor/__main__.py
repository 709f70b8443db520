"""`python -m betoken.verify_worker.doctor JSON`: runs all checks and writes the findings as a JSON list.

`betoken doctor` starts it and shows the findings. Packages that are missing or broken are findings, too.
"""

import json
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import asdict

from betoken.common.release import how_to_install
from betoken.verify_worker.doctor.environment import environment_findings
from betoken.verify_worker.doctor.finding import Finding, error
from betoken.verify_worker.doctor.options import DoctorOptions


def findings(options: DoctorOptions) -> list[Finding]:
    """Run all checks."""
    return [
        *_of_imports("python", lambda: _package_findings(options)),
        *environment_findings(os.environ, [name for _, name in socket.if_nameindex()]),
        *_of_imports("services", lambda: _machine_findings(options)),
        *_of_imports("torch", lambda: _worker_findings(options)),
    ]


def _of_imports(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """The findings of checks, or the package that they lack."""
    try:
        return check()
    except (ImportError, OSError) as fault:  # OSError: a library that a package loads
        return [error(name, f"cannot be imported: {fault}", how_to_install("worker"))]


def _package_findings(options: DoctorOptions) -> list[Finding]:
    from betoken.verify_worker.doctor.packages import packages_finding, python_finding

    return [python_finding(), packages_finding(on_gpu=(options.device or "").startswith("cuda"))]


def _machine_findings(options: DoctorOptions) -> list[Finding]:
    from betoken.verify_worker.doctor.machine import fast_wake_finding, ports_finding
    from betoken.verify_worker.doctor.rendezvous import rendezvous_finding

    found = [ports_finding(options.host, options.ports)] if options.ports else []
    if options.rendezvous is not None:
        found.append(rendezvous_finding(*options.rendezvous))
    return [*found, fast_wake_finding()]


def _worker_findings(options: DoctorOptions) -> list[Finding]:
    from betoken.verify_worker.doctor.worker import worker_findings

    return worker_findings(options)


def main() -> None:
    """Write the findings."""
    values = json.loads(sys.argv[1])
    rendezvous = values["rendezvous"] and tuple(values["rendezvous"])
    options = DoctorOptions(**values | {"ports": tuple(values["ports"]), "rendezvous": rendezvous})
    sys.stdout.write(json.dumps([asdict(finding) for finding in findings(options)]))


if __name__ == "__main__":
    main()
