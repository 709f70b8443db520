"""N-gram lookup in prompt and output as drafter: no model, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.common.names import PREDICTION
from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.spec import DrafterContext, DrafterSpec, Source

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.ngram.drafter import NgramDrafter

    return NgramDrafter(NgramSettings.of_options(host.settings))


SPEC = DrafterSpec(
    name="ngram",
    make=_make,
    explains="accepted from prompt lookup",
    colour="cyan",
    is_usual=True,
    can_attach=True,
    predicts=True,
    settings=NgramSettings,
    other_sources=(Source(PREDICTION, "accepted from what was expected", "cyan underline"),),
)
