"""Resources of services: memory, descriptors, KV pages.

Knows processes and the router's word on pages.
"""

from __future__ import annotations

from typing import Any

import psutil

from betoken.cli.local_services import LocalServices
from betoken.client import AsyncClient


async def usage(services: LocalServices, client: AsyncClient) -> dict[str, dict[str, Any]]:
    """By service: resident MB, open descriptors, and of workers free pages of all and open sequences."""
    held: dict[str, dict[str, Any]] = {}
    for name, service in services.services.items():
        process = psutil.Process(service.pid)
        held[name] = {"memory_mb": round(process.memory_info().rss / 2**20), "descriptors": process.num_fds()}
    info = await client.model_info()
    by_address = {service.address: name for name, service in services.services.items()}
    for worker in (*info.verify_workers, *info.draft_workers):
        pages = f"{worker.free_pages}/{worker.total_pages}"
        held[by_address[worker.address]] |= {"pages_free": pages, "sequences": worker.running + worker.waiting}
    return held
