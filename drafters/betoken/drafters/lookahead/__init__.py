"""Lookahead (Jacobi iteration) of a model as drafter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from betoken.drafters.lookahead.settings import LookaheadSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter

_MODEL = Option(
    "lookahead_model",
    str,
    "",
    "Model that `lookahead` iterates: a directory, or a hub id; default: the draft model, else the target.",
    names_weights=True,
)
_MODELS = (_MODEL.name, "model", "early_exit_model")
"""Settings that name the model it iterates; the first that is given."""


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.lookahead.drafter import LookaheadDrafter

    options = host.settings
    option = SPEC.used(options)
    assert option is not None, "settings are checked before drafters are made"
    runner, pages = host.model(option)
    settings = LookaheadSettings.of_options(options)
    return LookaheadDrafter(runner, options.max_num_batched_tokens, host.max_prefill_tokens, settings, pages)


def _check(settings: Any) -> None:
    num_rows = settings.lookahead_window * (settings.lookahead_ngram_size - 1)
    if num_rows > settings.max_num_batched_tokens:
        shape = f"--lookahead-ngram-size = {settings.lookahead_ngram_size}"
        limit = f"{num_rows} rows of a window exceed --max-num-batched-tokens = {settings.max_num_batched_tokens}"
        raise ValueError(f"--lookahead-window = {settings.lookahead_window} with {shape}: {limit}")


SPEC = DrafterSpec(
    name="lookahead",
    make=_make,
    explains="accepted from lookahead",
    colour="blue",
    needs=_MODELS,
    runs_model=True,
    check=_check,
    settings=LookaheadSettings,
    options=(_MODEL,),
    max_uncommitted=lambda settings: settings.max_num_batched_tokens,  # a window's rows
)
