"""A small model as drafter: chains and trees, with the target's own noise."""

from __future__ import annotations

from typing import TYPE_CHECKING

from betoken.drafters.model.settings import ModelSettings
from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.model.drafter import ModelDrafter


def drafter_of(host: DrafterContext, option: str, source: str, num_layers: int | None = None) -> ModelDrafter:
    """A drafter over the model, or its first layers, that `option` names."""
    from betoken.drafters.model.drafter import ModelDrafter

    runner, pages = host.model(option, num_layers)
    settings = ModelSettings.of_options(host.settings)
    return ModelDrafter(runner, host.settings.max_num_batched_tokens, host.max_prefill_tokens, source, settings, pages)


SPEC: DrafterSpec = DrafterSpec(
    name="model",
    make=lambda host: drafter_of(host, "model", SPEC.name),
    explains="accepted from the draft model",
    colour="green",
    needs=("model",),
    runs_model=True,
    is_usual=True,
    settings=ModelSettings,
)
