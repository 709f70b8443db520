"""Makes the block drafter for a target: finds its files, checks them against the target, sets up its pages.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from betoken.drafters.dflash.checkpoint import load_block, read_shape_of
from betoken.drafters.dflash.drafter import DflashDrafter
from betoken.drafters.dflash.forward import BlockForward
from betoken.drafters.dflash.settings import DflashSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape
from betoken.drafters.side.weights import SideWeights, columns_of
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.page_table import PageTable
from betoken.kernels.code_folder import user_cache_dir

_WEIGHTS = SideWeights("dflash")
_MAX_RECORDED_ROWS = 256
"""Rows of a pass that run as a CUDA graph: blocks of several sequences; prompts take more, eagerly."""


def state_layers(settings: Any, num_layers: int) -> Sequence[int]:
    """See `SideWeights`."""
    return _WEIGHTS.state_layers(settings, num_layers, read_shape_of)


def memory_of(settings: Any) -> Memory:
    """See `SideWeights`."""
    return _WEIGHTS.memory(settings, read_shape_of)


def make_drafter(host: DrafterContext) -> DflashDrafter:
    """The drafter of the settings' directory for the host's target.

    Raises:
        FailedPreconditionError: it cannot be read, or does not fit; the text names the option.
    """
    settings, target = host.settings, host.target
    parts, info, table = target.parts, target.info, target.page_table
    fits = TargetShape(info.model_id, info.vocab_size, parts.hidden_size, parts.num_layers, info.max_context)
    try:
        loaded = load_block(_WEIGHTS.directory(settings), fits)
    except ModelRefusedError as error:
        raise _WEIGHTS.refusal(settings, error) from error
    # As many pages as the target has: whatever it holds has room here, too, if blocks find some.
    forward = BlockForward(loaded, parts, table.num_pages, table.page_size, settings.cache_dir)
    if target.is_compiled:
        forward.compile(settings.cache_dir or user_cache_dir())
    if parts.device.type == "cuda":
        length = info.max_context + loaded.shape.block_size
        forward.record(min(_MAX_RECORDED_ROWS, target.max_num_batched_tokens), length)
    return DflashDrafter(
        forward,
        SharedPages(PageTable(table.num_pages, table.page_size, prefix_caching=settings.prefix_caching)),
        columns_of(loaded.state_layers),
        info.vocab_size,
        target.max_num_batched_tokens,
        DflashSettings.of_options(settings),
    )
