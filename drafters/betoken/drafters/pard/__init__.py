"""A PARD model attached to the verify worker: a small model that drafts all tokens in one forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from betoken.drafters.pard.settings import PardSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds, Memory

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _layers(settings: Any, num_layers: int) -> Sequence[int]:
    from betoken.drafters.pard.hosting import state_layers

    return state_layers(settings, num_layers)


def _memory(settings: Any) -> Memory:
    from betoken.drafters.pard.hosting import memory_of

    return memory_of(settings)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.pard.hosting import make_drafter

    return make_drafter(host)


_MODEL = Option("pard", str, None, "Directory or hub id of the PARD model of `pard`.", names_weights=True)

SPEC = DrafterSpec(
    name="pard",
    make=_make,
    explains="accepted from the PARD model",
    colour="bright_green underline",
    needs=(_MODEL.name,),
    runs_model=True,
    can_attach=True,
    can_host=False,
    memory=_memory,
    features=FeatureNeeds(layers=_layers, steers_by_whole_text=True, is_optional=True),
    settings=PardSettings,
    options=(_MODEL,),
)
