"""Multi-token prediction (MTP) layers that the target's checkpoint holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from betoken.drafters.mtp.settings import MtpSettings
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds, Memory

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _memory(settings: Any) -> Memory:
    from betoken.drafters.mtp.hosting import memory_of

    return memory_of(settings)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.mtp.hosting import make_drafter

    return make_drafter(host)


def _is_built_in(settings: Any) -> bool:
    from betoken.drafters.mtp.hosting import is_built_in

    return is_built_in(settings)


SPEC = DrafterSpec(
    name="mtp",
    make=_make,
    explains="accepted from the target's MTP layer",
    colour="magenta underline",
    can_attach=True,
    can_host=False,
    is_built_in=_is_built_in,
    memory=_memory,
    features=FeatureNeeds(layers=lambda settings, num_layers: (num_layers,), steers_by_whole_text=True),
    settings=MtpSettings,
)
