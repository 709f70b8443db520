"""N-grams draft for the small model, which drafts for the target."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from betoken.drafters import model
from betoken.drafters.ngram.settings import NgramSettings
from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter
    from betoken.drafters.model.drafter import ModelDrafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.staged.drafter import StagedDrafter

    return StagedDrafter(cast("ModelDrafter", host.drafter(model.SPEC.name)), NgramSettings.of_options(host.settings))


SPEC = DrafterSpec(
    name="staged",
    make=_make,
    needs=model.SPEC.needs,
    runs_model=True,
    is_usual=True,
    translates=True,
    settings=NgramSettings,
)
