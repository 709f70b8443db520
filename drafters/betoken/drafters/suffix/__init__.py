"""Lookup in earlier texts of a tenant as drafter (SuffixDecoding): no model, no device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.drafters import ngram
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec
from betoken.drafters.suffix.settings import MemoryOptions, SuffixSettings

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter

_MEMORY = Option(
    "suffix_memory",
    str,
    "",
    "Memory of `suffix`, NAME=VALUE separated by spaces: max_bytes (64 MiB; a token takes about 28), shared_tenants=1 ="
    " draft from texts of other tenants, file = keep texts over restarts, corpus = files for all tenants, with commas.",
    check=MemoryOptions.parse,
)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.suffix.making import make_drafter

    return make_drafter(host)


SPEC = DrafterSpec(
    name="suffix",
    make=_make,
    explains="accepted from an earlier text",
    colour="bright_magenta",
    can_attach=True,
    predicts=True,
    settings=SuffixSettings,
    options=(_MEMORY,),
    other_sources=ngram.SPEC.sources,
)
