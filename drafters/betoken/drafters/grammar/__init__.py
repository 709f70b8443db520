"""Drafter of forced tokens: tokens that a constraint determines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.grammar.drafter import GrammarDrafter

    return GrammarDrafter()


SPEC = DrafterSpec(
    name="grammar",
    make=_make,
    explains="the only token that the constraint allowed",
    colour="yellow underline",
    can_attach=True,
    can_host=False,
    comes_first=True,
)
