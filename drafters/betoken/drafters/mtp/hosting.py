"""Makes the drafter for a target: finds the MTP layer in its checkpoint, checks it, sets up its pages.

Knows settings and the target's description; no sequences.
"""

from __future__ import annotations

import logging
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.eagle3.drafter import EagleDrafter
from betoken.drafters.mtp.checkpoint import (
    MtpRefusedError,
    NoMtpLayerError,
    check_layer,
    find_layer,
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
    """Whether the target's checkpoint holds an MTP layer that can draft; logs why one cannot."""
    try:
        check_layer(find_layer(settings.model, settings.revision))
    except NoMtpLayerError:
        return False
    except MtpRefusedError as error:
        _LOG.warning("the drafter %s is not attached: %s", _NAME, error)
        return False
    except ModelRefusedError:  # the model's own load reports it
        return False
    return True


def memory_of(settings: Any) -> Memory:
    """Memory of the layer: weights as they are stored, a page of its cache for each of the target's.

    Raises:
        FailedPreconditionError: the checkpoint holds no layer, or an unsupported one.
        ModelRefusedError: the checkpoint cannot be read.
    """
    itemsize = 2 if settings.dtype in ("bfloat16", "float16") else 4
    try:
        found = find_layer(settings.model, settings.revision)
        return Memory(found.num_bytes, kv_shape(found.config).page_bytes(settings.page_size, itemsize))
    except MtpRefusedError as error:
        raise _refusal(settings, error) from error


def make_drafter(host: DrafterContext) -> EagleDrafter:
    """The drafter of the target's own MTP layer.

    Raises:
        FailedPreconditionError: the checkpoint holds none, or a tensor is missing or misshapen.
    """
    settings, target = host.settings, host.target
    parts, info, table = target.parts, target.info, target.page_table
    try:
        found = find_layer(settings.model, settings.revision)
        model, shape = load_layer(found, parts.dtype), kv_shape(found.config)
    except MtpRefusedError as error:
        raise _refusal(settings, error) from error
    # As many pages as the target has: whatever it holds has room here, too.
    pages = (table.num_pages, table.page_size)
    forward = MtpForward(model, shape, parts, info.vocab_size, *pages, settings.cache_dir)
    if target.is_compiled:
        forward.compile(settings.cache_dir or user_cache_dir())
    if parts.device.type == "cuda":
        forward.record(min(_MAX_RECORDED_ROWS, target.max_num_batched_tokens), info.max_context)
    return EagleDrafter(
        forward,
        SharedPages(PageTable(*pages, prefix_caching=settings.prefix_caching)),
        [0],
        info.vocab_size,
        target.max_num_batched_tokens,
        MtpSettings.of_options(settings),
        source=_NAME,
    )


def _refusal(settings: Any, error: MtpRefusedError) -> FailedPreconditionError:
    return FailedPreconditionError(f"--attached-drafters = {_NAME}: {settings.model}: {error}")
