"""A layer of the EAGLE family attached to the target whose hidden states it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from betoken.drafters.features import FeatureNeeds
from betoken.drafters.spec import DrafterContext, DrafterSpec, Memory

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


SPEC = DrafterSpec(
    name="eagle3",
    make=_make,
    explains="accepted from the EAGLE layer",
    colour="blue underline",
    needs=("eagle3",),
    can_attach=True,
    can_host=False,
    memory=_memory,
    features=FeatureNeeds(layers=_layers, steers_by_whole_text=True),
)
