"""Makes the drafter for a target: finds the layer's files, checks them against the target, sets up its pages.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from betoken.drafters.eagle3.checkpoint import load_layer, read_shape_of
from betoken.drafters.eagle3.drafter import EagleDrafter
from betoken.drafters.eagle3.forward import LayerForward
from betoken.drafters.eagle3.parallel import ParallelEagleDrafter
from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape
from betoken.drafters.side.weights import SideWeights, columns_of
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.page_table import PageTable
from betoken.kernels.code_folder import user_cache_dir

_WEIGHTS = SideWeights("eagle3", ("pytorch_model.bin",))
_MAX_RECORDED_ROWS = 128
"""Rows of a draft's pass that run as a CUDA graph: some branches of many sequences; prompts take more, eagerly."""


def state_layers(settings: Any, num_layers: int) -> Sequence[int]:
    """See `SideWeights`."""
    return _WEIGHTS.state_layers(settings, num_layers, read_shape_of)


def memory_of(settings: Any) -> Memory:
    """See `SideWeights`."""
    return _WEIGHTS.memory(settings, read_shape_of)


def make_drafter(host: DrafterContext) -> EagleDrafter | ParallelEagleDrafter:
    """The drafter of the settings' layer for the host's target.

    Raises:
        FailedPreconditionError: the layer cannot be read, or does not fit; the text names the option.
    """
    settings, target = host.settings, host.target
    parts, info, table = target.parts, target.info, target.page_table
    fits = TargetShape(info.model_id, info.vocab_size, parts.hidden_size, parts.num_layers)
    try:
        loaded = load_layer(_WEIGHTS.directory(settings), fits)
    except ModelRefusedError as error:
        raise _WEIGHTS.refusal(settings, error) from error
    # As many pages as the target has: whatever it holds has room here, too.
    forward = LayerForward(loaded, parts, table.num_pages, table.page_size, settings.cache_dir)
    if target.is_compiled:
        forward.compile(settings.cache_dir or user_cache_dir())
    if parts.device.type == "cuda":
        forward.record(min(_MAX_RECORDED_ROWS, target.max_num_batched_tokens), info.max_context)
    pages = SharedPages(PageTable(table.num_pages, table.page_size, prefix_caching=settings.prefix_caching))
    columns, max_rows = columns_of(loaded.state_layers), target.max_num_batched_tokens
    if loaded.shape.mask_token_id is not None:
        return ParallelEagleDrafter(forward, pages, columns, info.vocab_size, max_rows)
    return EagleDrafter(forward, pages, columns, info.vocab_size, max_rows, EagleSettings.of_options(settings))
