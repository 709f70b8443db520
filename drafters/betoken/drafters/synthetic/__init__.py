"""A simulated drafter for synthetic targets: acceptance, hit rate and step times are given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.common.synthetic import Simulation
from betoken.drafters.spec import DrafterContext, DrafterSpec
from betoken.drafters.synthetic.settings import SyntheticSettings

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.synthetic.drafter import SyntheticDrafter

    simulation = Simulation.parse(host.settings.synthetic)
    return SyntheticDrafter(simulation.times, SyntheticSettings(simulation.acceptance, simulation.hit_rate))


SPEC = DrafterSpec(
    name="synthetic",
    make=_make,
    explains="accepted from the synthetic drafter",
    colour="red underline",
    simulates=True,
    settings=SyntheticSettings,
)
