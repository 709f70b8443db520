"""Resources of services: memory, descriptors, connections, threads, KV pages.

Knows processes and the router's word on pages.
"""

from __future__ import annotations

from typing import Any

import psutil

from betoken.cli.local_services import LocalServices
from betoken.client import AsyncClient

_MAX_GROWTH = {"memory_mb": 150, "descriptors": 16, "connections": 16, "threads": 16}
"""Growth that caches, thread pools and connections of the measurement itself explain."""


async def usage(services: LocalServices, client: AsyncClient) -> dict[str, dict[str, Any]]:
    """By service: resident MB, open descriptors, and of workers free pages of all and open sequences."""
    held: dict[str, dict[str, Any]] = {}
    for name, service in services.services.items():
        process = psutil.Process(service.pid)
        held[name] = {
            "pid": service.pid,
            "memory_mb": round(process.memory_info().rss / 2**20),
            "descriptors": process.num_fds(),
            "connections": len(process.net_connections()),
            "threads": process.num_threads(),
        }
    info = await client.model_info()
    by_address = {service.address: name for name, service in services.services.items()}
    for worker in (*info.verify_workers, *info.draft_workers):
        pages = f"{worker.free_pages}/{worker.total_pages}"
        held[by_address[worker.address]] |= {"pages_free": pages, "sequences": worker.running + worker.waiting}
    return held


def growth(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Return what a service that ran throughout, or its successor, holds more than before."""
    return [
        f"{name}: {what} {before[name][what]} -> {held[what]}"
        for name, held in after.items()
        for what, most in _MAX_GROWTH.items()
        if held[what] > before[name][what] + most
    ]
