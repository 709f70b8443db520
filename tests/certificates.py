"""Certificates for the tests of TLS, made by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificate(folder: Path, name: str, host: str) -> None:
    """`name`.pem for a host, self-signed, and `name`.key; without openssl the test is skipped."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl command to make certificates")
    command = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 -subj /CN={name}"
    command += f" -keyout {name}.key -out {name}.pem -addext subjectAltName=DNS:{host}"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True, timeout=60)
