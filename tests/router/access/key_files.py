"""Files of keys for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from betoken.common.api_key import hash_of

ALICE, BOB = "key-of-alice", "key-of-bob"


def write(path: Path, keys: dict[str, dict[str, Any]], tenants: dict[str, dict[str, Any]] | None = None) -> Path:
    """A file that lets in each key of `keys` with these fields; one without a name is called as its key."""
    lines = []
    for key, fields in keys.items():
        lines += ["[[keys]]", f'hash = "{hash_of(key)}"']
        lines += [f"{name} = {json.dumps(value)}" for name, value in ({"name": key} | fields).items()]
    for tenant, limits in (tenants or {}).items():
        lines += [f"[tenants.{tenant}]", *(f"{name} = {value}" for name, value in limits.items())]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines))
    return partial.replace(path)


def header(key: str) -> tuple[tuple[str, str], ...]:
    """The metadata that sends `key`."""
    return (("authorization", f"Bearer {key}"),)
