"""Makes the drafter for a target: finds the layer's files, checks them against the target, sets up its pages.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.eagle3.checkpoint import load_layer, read_shape_of
from betoken.drafters.eagle3.drafter import EagleDrafter
from betoken.drafters.eagle3.forward import LayerForward, kv_shape
from betoken.drafters.eagle3.parallel import ParallelEagleDrafter
from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.files import TargetShape, weight_files
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.page_table import PageTable
from betoken.engine.weights.checkpoint import resolve_directory
from betoken.kernels.code_folder import user_cache_dir

_PICKLES = ("pytorch_model.bin",)
_MAX_RECORDED_ROWS = 128
"""Rows of a draft's pass that run as a CUDA graph: some branches of many sequences; prompts take more, eagerly."""


def state_layers(settings: Any, num_layers: int) -> Sequence[int]:
    """States of a target with so many layers that the layer of the settings reads.

    Raises:
        FailedPreconditionError: it cannot be read, or the target has no such layers; the text names the option.
    """
    try:
        return read_shape_of(_directory(settings)).states_of(num_layers)
    except ModelRefusedError as error:
        raise _refusal(settings, error) from error


def memory_of(settings: Any) -> Memory:
    """Memory of the settings' layer: weights as they are stored, a page of its cache for each of the target's.

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


def make_drafter(host: DrafterContext) -> EagleDrafter | ParallelEagleDrafter:
    """The drafter of the settings' layer for the host's target.

    Raises:
        FailedPreconditionError: the layer cannot be read, or does not fit; the text names the option.
    """
    settings, target = host.settings, host.target
    parts, info, table = target.parts, target.info, target.page_table
    fits = TargetShape(info.model_id, info.vocab_size, parts.hidden_size, parts.num_layers)
    try:
        loaded = load_layer(_directory(settings), fits)
    except ModelRefusedError as error:
        raise _refusal(settings, error) from error
    # As many pages as the target has: whatever it holds has room here, too.
    forward = LayerForward(loaded, parts, table.num_pages, table.page_size, settings.cache_dir)
    if target.is_compiled:
        forward.compile(settings.cache_dir or user_cache_dir())
    if parts.device.type == "cuda":
        forward.record(min(_MAX_RECORDED_ROWS, target.max_num_batched_tokens), info.max_context)
    places = {layer: place for place, layer in enumerate(sorted(set(loaded.state_layers)))}
    pages = SharedPages(PageTable(table.num_pages, table.page_size, prefix_caching=settings.prefix_caching))
    columns, max_rows = [places[layer] for layer in loaded.state_layers], target.max_num_batched_tokens
    if loaded.shape.mask_token_id is not None:
        return ParallelEagleDrafter(forward, pages, columns, info.vocab_size, max_rows)
    return EagleDrafter(forward, pages, columns, info.vocab_size, max_rows, EagleSettings.of_options(settings))


def _directory(settings: Any) -> Path:
    return resolve_directory(settings.eagle3, None, also=_PICKLES)


def _refusal(settings: Any, error: ModelRefusedError) -> FailedPreconditionError:
    return FailedPreconditionError(f"--eagle3 = {settings.eagle3}: {error}")
