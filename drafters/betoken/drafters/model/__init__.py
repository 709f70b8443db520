"""A small model as drafter: chains and trees, with the target's own noise."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from betoken.drafters.model.settings import ModelSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.model.drafter import ModelDrafter

_LOG = logging.getLogger(__name__)
TARGET_TOKENIZER = Option(
    "target_tokenizer",
    str,
    "",
    "Target model or its tokenizer.json, for draft models with another tokenizer: their drafts are translated. A"
    " directory, a file, or a hub id.",
)


def drafter_of(host: DrafterContext, option: str, source: str, num_layers: int | None = None) -> ModelDrafter:
    """A drafter over the model, or its first layers, that `option` names."""
    from betoken.drafters.model.drafter import ModelDrafter

    runner, pages = host.model(option, num_layers)
    settings = ModelSettings.of_options(host.settings)
    mask_token_id = runner.info.mask_token_id
    if mask_token_id is not None:
        _LOG.info("%s drafts in parallel (PARD): one forward per draft, mask token %d", source, mask_token_id)
    max_rows = host.settings.max_num_batched_tokens
    return ModelDrafter(runner, max_rows, host.max_prefill_tokens, source, settings, pages, mask_token_id)


SPEC: DrafterSpec = DrafterSpec(
    name="model",
    make=lambda host: drafter_of(host, "model", SPEC.name),
    explains="accepted from the draft model",
    colour="green",
    needs=("model",),
    runs_model=True,
    is_usual=True,
    settings=ModelSettings,
    translates=True,
    options=(TARGET_TOKENIZER,),
)
