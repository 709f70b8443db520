"""Checks the header `Host`: a page whose name was rebound to this machine's address sends its own name.

Accepts addresses, localhost and the operator's names.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address


class AllowedHosts:
    """Host names that requests may be addressed to; `*` = all, `*.NAME` = all below NAME."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(name.lower().rstrip(".") for name in names)

    def allows(self, header: str) -> bool:
        """Return whether `header`, perhaps with a port, is accepted; no browser leaves it empty."""
        host = _without_port(header.strip().lower()).rstrip(".")
        if not host or host == "localhost" or host.endswith(".localhost") or "*" in self._names:
            return True
        above = host.split(".")
        patterns = {f"*.{'.'.join(above[index:])}" for index in range(1, min(len(above), 32))}
        return host in self._names or bool(self._names & patterns) or _is_address(host)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    name, _, port = host.rpartition(":")
    return name if name and ":" not in name and port.isdigit() else host.removesuffix(":")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
