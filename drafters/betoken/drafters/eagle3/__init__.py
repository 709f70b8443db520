"""A layer of the EAGLE family attached to the target whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds, Memory

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _layers(settings: Any, num_layers: int) -> Sequence[int]:
    from betoken.drafters.eagle3.hosting import state_layers

    return state_layers(settings, num_layers)


def _memory(settings: Any) -> Memory:
    from betoken.drafters.eagle3.hosting import memory_of

    return memory_of(settings)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.eagle3.hosting import make_drafter

    return make_drafter(host)


_LAYER = Option(
    "eagle3",
    str,
    None,
    "Directory or hub id of the layer of `eagle3`: EAGLE-3, or weights of EAGLE-1 and EAGLE-2.",
    names_weights=True,
)

SPEC = DrafterSpec(
    name="eagle3",
    make=_make,
    explains="accepted from the EAGLE layer",
    colour="blue underline",
    needs=(_LAYER.name,),
    can_attach=True,
    can_host=False,
    memory=_memory,
    features=FeatureNeeds(layers=_layers, steers_by_whole_text=True, embeds=True),
    settings=EagleSettings,
    options=(_LAYER,),
)
