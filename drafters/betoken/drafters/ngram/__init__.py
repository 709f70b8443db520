"""N-gram lookup in prompt and output as drafter: no model, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.common.names import PREDICTION
from betoken.drafters.spec import DrafterContext, DrafterSpec, Source

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter
    from betoken.drafters.ngram.drafter import NgramSettings


def settings_of(host: DrafterContext) -> NgramSettings:
    """How to look up where a request says nothing else."""
    from betoken.drafters.ngram.drafter import NgramSettings

    options = host.settings
    return NgramSettings(options.min_ngram, options.max_ngram, options.max_branches, options.draft_factor)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.ngram.drafter import NgramDrafter

    return NgramDrafter(settings_of(host))


SPEC = DrafterSpec(
    name="ngram",
    make=_make,
    explains="accepted from prompt lookup",
    colour="cyan",
    is_usual=True,
    can_attach=True,
    predicts=True,
    other_sources=(Source(PREDICTION, "accepted from what was expected", "cyan underline"),),
)
