"""`betoken check-keys FILE`: reads a key file as a router would, before a router does.

Shows names and limits; never a hash.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from betoken.common.errors import FailedPreconditionError
from betoken.router.access.key_file import read_key_file


def main(arguments: Sequence[str] | None = None) -> int:
    """Check the file; 1 if a router would reject it."""
    parser = argparse.ArgumentParser(
        prog="betoken check-keys", description="Check a file of API keys (--api-keys-file) as a router would."
    )
    parser.add_argument("file", type=Path, help="the key file")
    path: Path = parser.parse_args(arguments).file
    try:
        file = read_key_file(path)
    except FailedPreconditionError as error:
        sys.stderr.write(f"betoken check-keys: {error}\n")
        return 1
    for warning in file.warnings():
        sys.stderr.write(f"betoken check-keys: warning: {warning}\n")
    tenants: dict[str, list[str]] = {}
    for key in file.keys:
        tenants.setdefault(key.tenant_name, []).append(key.name)
    for tenant, names in sorted(tenants.items()):
        sys.stdout.write(f"tenant {tenant}: {', '.join(names)}\n")
    sys.stdout.write(f"{len(file.keys)} keys of {len(tenants)} tenants\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
