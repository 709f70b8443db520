"""Makes the drafters that are attached to a verify worker, from their specs. Knows no sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from betoken.drafters import grammar
from betoken.drafters.host.feed import FeatureFeed
from betoken.drafters.registry import SPECS
from betoken.drafters.spec import Memory
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1.types_pb2 import SourceInfo
from betoken.verify_worker.settings import VerifyWorkerSettings

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter
    from betoken.drafters.shared_pages import SharedPages
    from betoken.engine.runner import ModelRunner


def attached_drafters(settings: VerifyWorkerSettings, target: ModelRunner) -> dict[str, Drafter]:
    """Drafters by name, in the order of the settings.

    Raises:
        FailedPreconditionError: what one of them needs does not fit the target, or is missing.
    """
    host = _Host(settings, target)
    names = settings.attached_drafters
    for name in sorted(names, key=lambda name: SPECS[name].num_others):  # those that choose among others come last
        host.made[name] = host.drafter(name)
    return {name: host.made[name] for name in names}


def attached_layers(settings: VerifyWorkerSettings, num_layers: int) -> list[int]:
    """Layers of a target with so many whose hidden states some attached drafter reads."""
    needs = [SPECS[name].features for name in settings.attached_drafters]
    return [layer for need in needs if need is not None for layer in need.layers(settings, num_layers)]


def attached_memory(settings: VerifyWorkerSettings) -> Memory:
    """Memory that the attached drafters take.

    Raises:
        FailedPreconditionError: what one of them needs cannot be read.
    """
    taken = [memory(settings) for name in settings.attached_drafters if (memory := SPECS[name].memory) is not None]
    return Memory(sum(one.weight_bytes for one in taken), sum(one.page_bytes for one in taken))


def feature_feed(settings: VerifyWorkerSettings, target: ModelRunner) -> FeatureFeed:
    """Tells attached drafters the rows of the layers that they read."""
    needs = {name: need for name in settings.attached_drafters if (need := SPECS[name].features) is not None}
    num_layers = target.parts.num_layers
    layers = {
        name: sorted({layer % (num_layers + 1) for layer in need.layers(settings, num_layers)})
        for name, need in needs.items()
    }
    return FeatureFeed(
        layers,
        target.feature_layers,
        [name for name, need in needs.items() if need.of_whole_text],
        [name for name, need in needs.items() if need.steers_by_whole_text],
    )


def attached_sources(settings: VerifyWorkerSettings) -> list[SourceInfo]:
    """Names and colours of their tokens' sources."""
    sources = (source for name in settings.attached_drafters for source in SPECS[name].sources)
    return [SourceInfo(name=source.name, explains=source.explains, colour=source.colour) for source in sources]


@dataclass(frozen=True, slots=True)
class _Host:
    """The services of this worker to its drafters; see `DrafterContext`."""

    settings: VerifyWorkerSettings
    target: ModelRunner
    made: dict[str, Drafter] = field(default_factory=dict)

    @property
    def max_prefill_rows(self) -> int:
        return self.settings.max_prefill_rows or USUAL_PREFILL_ROWS

    def model(self, option: str, num_layers: int | None = None) -> tuple[ModelRunner, SharedPages]:
        raise AssertionError("no drafter that runs a model of its own can be attached")

    def drafter(self, name: str) -> Drafter:
        return SPECS[name].make(self)

    def others(self, name: str) -> dict[str, Drafter]:
        return {other: self.made[other] for other in self.settings.attached_drafters if _is_source(other)}


def _is_source(name: str) -> bool:
    """Whether `fused` may choose it: forced tokens come first in any case."""
    return not SPECS[name].num_others and name != grammar.SPEC.name
