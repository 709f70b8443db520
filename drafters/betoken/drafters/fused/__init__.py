"""Several drafters behind one, chosen by measured speed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.fused.drafter import FusedDrafter

    return FusedDrafter(host.others(SPEC.name))


SPEC = DrafterSpec(name="fused", make=_make, is_usual=True, can_attach=True, num_others=2)
