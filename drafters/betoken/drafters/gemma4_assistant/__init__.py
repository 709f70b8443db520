"""Gemma-4 assistants: layers without KV, attached to the target whose KV and last hidden state they read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from betoken.drafters.gemma4_assistant.settings import Gemma4AssistantSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds, Memory

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _memory(settings: Any) -> Memory:
    from betoken.drafters.gemma4_assistant.hosting import memory_of

    return memory_of(settings)


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.gemma4_assistant.hosting import make_drafter

    return make_drafter(host)


_WEIGHTS = Option(
    "gemma4_assistant",
    str,
    None,
    "Directory or hub id of the assistant of `gemma4_assistant`, for a Gemma-4 target.",
    names_weights=True,
)

SPEC = DrafterSpec(
    name="gemma4_assistant",
    make=_make,
    explains="accepted from the Gemma-4 assistant",
    colour="bright_red underline",
    needs=(_WEIGHTS.name,),
    can_attach=True,
    can_host=False,
    memory=_memory,
    features=FeatureNeeds(layers=lambda settings, num_layers: (num_layers,), steers_by_whole_text=True),
    reads_target_kv=True,
    settings=Gemma4AssistantSettings,
    options=(_WEIGHTS,),
)
