"""Makes the block drafter for a target: finds its files, checks them against the target, sets up its pages.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.dflash.checkpoint import load_block, read_shape_of
from betoken.drafters.dflash.drafter import DflashDrafter
from betoken.drafters.dflash.forward import BlockForward, kv_shape
from betoken.drafters.dflash.settings import DflashSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape, weight_files
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.page_table import PageTable
from betoken.engine.weights.checkpoint import resolve_directory
from betoken.kernels.code_folder import user_cache_dir

_MAX_RECORDED_ROWS = 256
"""Rows of a pass that run as a CUDA graph: blocks of several sequences; prompts take more, eagerly."""


def state_layers(settings: Any, num_layers: int) -> Sequence[int]:
    """States of a target with so many layers that the drafter of the settings reads.

    Raises:
        FailedPreconditionError: it cannot be read, or the target has no such layers; the text names the option.
    """
    try:
        return read_shape_of(_directory(settings)).states_of(num_layers)
    except ModelRefusedError as error:
        raise _refusal(settings, error) from error


def memory_of(settings: Any) -> Memory:
    """Memory of the settings' drafter: weights as they are stored, a page of its cache for each of the target's.

    Raises:
        FailedPreconditionError: it cannot be read; the text names the option.
    """
    itemsize = 2 if settings.dtype in ("bfloat16", "float16") else 4
    try:
        directory = _directory(settings)
        shape = read_shape_of(directory)
        page_bytes = shape.num_layers * kv_shape(shape).page_bytes(settings.page_size, itemsize)
        return Memory(sum(path.stat().st_size for path in weight_files(directory)), page_bytes)
    except ModelRefusedError as error:
        raise _refusal(settings, error) from error


def make_drafter(host: DrafterContext) -> DflashDrafter:
    """The drafter of the settings' directory for the host's target.

    Raises:
        FailedPreconditionError: it cannot be read, or does not fit; the text names the option.
    """
    settings, target = host.settings, host.target
    parts, info, table = target.parts, target.info, target.page_table
    fits = TargetShape(info.model_id, info.vocab_size, parts.hidden_size, parts.num_layers, info.max_context)
    try:
        loaded = load_block(_directory(settings), fits)
    except ModelRefusedError as error:
        raise _refusal(settings, error) from error
    # As many pages as the target has: whatever it holds has room here, too, if blocks find some.
    forward = BlockForward(loaded, parts, table.num_pages, table.page_size, settings.cache_dir)
    if target.is_compiled:
        forward.compile(settings.cache_dir or user_cache_dir())
    if parts.device.type == "cuda":
        length = info.max_context + loaded.shape.block_size
        forward.record(min(_MAX_RECORDED_ROWS, target.max_num_batched_tokens), length)
    places = {layer: place for place, layer in enumerate(sorted(set(loaded.state_layers)))}
    return DflashDrafter(
        forward,
        SharedPages(PageTable(table.num_pages, table.page_size, prefix_caching=settings.prefix_caching)),
        [places[layer] for layer in loaded.state_layers],
        info.vocab_size,
        target.max_num_batched_tokens,
        DflashSettings.of_options(settings),
    )


def _directory(settings: Any) -> Path:
    return resolve_directory(settings.dflash, None)


def _refusal(settings: Any, error: ModelRefusedError) -> FailedPreconditionError:
    return FailedPreconditionError(f"--dflash = {settings.dflash}: {error}")
