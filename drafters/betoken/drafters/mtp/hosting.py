"""Makes the drafter for a target: finds the MTP layers in its checkpoint, checks them, sets up their pages.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

import logging
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.eagle3.drafter import EagleDrafter
from betoken.drafters.mtp.chained import ChainedMtpDrafter
from betoken.drafters.mtp.checkpoint import (
    MtpRefusedError,
    MtpTensors,
    NoMtpLayerError,
    check_layer,
    find_layers,
    kv_shape,
    load_layer,
)
from betoken.drafters.mtp.forward import MtpForward
from betoken.drafters.mtp.settings import MtpSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.spec import DrafterContext, Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.page_table import PageTable
from betoken.kernels.code_folder import user_cache_dir

_LOG = logging.getLogger(__name__)

_NAME = "mtp"
_MAX_RECORDED_ROWS = 128
"""Rows of a pass that run as a CUDA graph, enough for the drafts of many sequences; prompts run eagerly."""


def is_built_in(settings: Any) -> bool:
    """Whether the target's checkpoint holds MTP layers that can draft; logs why they cannot."""
    try:
        for found in find_layers(settings.model, settings.revision):
            check_layer(found)
    except NoMtpLayerError:
        return False
    except MtpRefusedError as error:
        _LOG.warning("the drafter %s is not attached: %s", _NAME, error)
        return False
    except ModelRefusedError:  # the model's own load reports it
        return False
    return True


def memory_of(settings: Any) -> Memory:
    """Memory of the layers: weights as they are stored, a page of each cache for each of the target's.

    Raises:
        FailedPreconditionError: the checkpoint holds no layer, or an unsupported one.
        ModelRefusedError: the checkpoint cannot be read.
    """
    itemsize = 2 if settings.dtype in ("bfloat16", "float16") else 4
    try:
        layers = find_layers(settings.model, settings.revision)
        page_bytes = sum(kv_shape(found).page_bytes(settings.page_size, itemsize) for found in layers)
        return Memory(sum(found.num_bytes for found in layers), page_bytes)
    except MtpRefusedError as error:
        raise _refusal(settings, error) from error


def make_drafter(host: DrafterContext) -> EagleDrafter | ChainedMtpDrafter:
    """The drafter of the target's own MTP layers.

    Raises:
        FailedPreconditionError: the checkpoint holds none, or a tensor is missing or misshapen.
    """
    settings, target = host.settings, host.target
    table, vocab_size, max_rows = target.page_table, target.info.vocab_size, target.max_num_batched_tokens
    try:
        found = find_layers(settings.model, settings.revision)
        layers = [_forward(host, layer, has_head=len(found) == 1) for layer in found]
    except MtpRefusedError as error:
        raise _refusal(settings, error) from error
    pages = SharedPages(PageTable(table.num_pages, table.page_size, prefix_caching=settings.prefix_caching))
    if len(layers) > 1:
        return ChainedMtpDrafter(layers, pages, vocab_size, max_rows)
    own = MtpSettings.of_options(settings)
    return EagleDrafter(layers[0], pages, [0], vocab_size, max_rows, own, source=_NAME)


def _forward(host: DrafterContext, found: MtpTensors, has_head: bool) -> MtpForward:
    """A layer with its weights, over as many pages as the target has: whatever that holds has room here, too."""
    settings, target = host.settings, host.target
    parts, info, table = target.parts, target.info, target.page_table
    model, shape, folder = load_layer(found, parts.dtype), kv_shape(found), settings.cache_dir
    pages = (table.num_pages, table.page_size)
    forward = MtpForward(model, shape, parts, info.vocab_size, *pages, folder, has_head)
    if target.is_compiled:
        forward.compile(folder or user_cache_dir())
    if parts.device.type == "cuda":
        forward.record(min(_MAX_RECORDED_ROWS, target.max_num_batched_tokens), info.max_context)
    return forward


def _refusal(settings: Any, error: MtpRefusedError) -> FailedPreconditionError:
    return FailedPreconditionError(f"--attached-drafters = {_NAME}: {settings.model}: {error}")
