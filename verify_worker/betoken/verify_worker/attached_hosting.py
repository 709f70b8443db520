"""Makes the drafters that are attached to a verify worker, from their specs. Knows no sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from betoken.drafters.registry import SPECS
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1.types_pb2 import SourceInfo
from betoken.verify_worker.settings import VerifyWorkerSettings

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter
    from betoken.drafters.shared_pages import SharedPages
    from betoken.engine.runner import ModelRunner


def attached_drafters(settings: VerifyWorkerSettings) -> dict[str, Drafter]:
    """Drafters by name, in the order of the settings."""
    host = _Host(settings)
    return {name: host.drafter(name) for name in settings.attached_drafters}


def attached_sources(settings: VerifyWorkerSettings) -> list[SourceInfo]:
    """Names and colours of their tokens' sources."""
    specs = [SPECS[name] for name in settings.attached_drafters]
    return [SourceInfo(name=spec.name, explains=spec.explains, colour=spec.colour) for spec in specs if spec.explains]


@dataclass(frozen=True, slots=True)
class _Host:
    """What this worker lends to its drafters; see `DrafterHost`."""

    settings: VerifyWorkerSettings

    @property
    def max_prefill_rows(self) -> int:
        return self.settings.max_prefill_rows or USUAL_PREFILL_ROWS

    def model(self, option: str, num_layers: int | None = None) -> tuple[ModelRunner, SharedPages]:
        raise AssertionError("no drafter that runs a model of its own can be attached")

    def drafter(self, name: str) -> Drafter:
        return SPECS[name].make(self)

    def others(self, name: str) -> dict[str, Drafter]:
        raise AssertionError("no drafter that chooses among others can be attached")
