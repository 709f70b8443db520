"""Medusa: heads on the target's last hidden state, each of which guesses one token further ahead. Attached only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.drafters.features import FeatureNeeds
from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.medusa.hosting import make_drafter

    return make_drafter(host)


SPEC = DrafterSpec(
    name="medusa",
    make=_make,
    explains="accepted from Medusa heads",
    colour="magenta underline",
    can_attach=True,
    can_host=False,
    features=FeatureNeeds(layers=lambda settings, num_layers: (num_layers,)),
)
