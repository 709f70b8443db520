"""Block drafters (DFlash, DFlash 2, DSpark) attached to the target whose hidden states they read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from betoken.drafters.dflash.settings import DflashSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds, Memory

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _layers(settings: Any, num_layers: int) -> Sequence[int]:
    from betoken.drafters.dflash.hosting import state_layers

    return state_layers(settings, num_layers)


def _memory(settings: Any) -> Memory:
    from betoken.drafters.dflash.hosting import memory_of

    return memory_of(settings)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.dflash.hosting import make_drafter

    return make_drafter(host)


_WEIGHTS = Option(
    "dflash",
    str,
    None,
    "Directory or hub id of the block drafter of `dflash`: DFlash, DFlash 2 or DSpark.",
    names_weights=True,
)

SPEC = DrafterSpec(
    name="dflash",
    make=_make,
    explains="accepted from the block drafter",
    colour="bright_red",
    needs=(_WEIGHTS.name,),
    can_attach=True,
    can_host=False,
    memory=_memory,
    features=FeatureNeeds(layers=_layers, steers_by_whole_text=True, embeds=True),
    settings=DflashSettings,
    options=(_WEIGHTS,),
)
