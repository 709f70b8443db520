"""Multi-token prediction (MTP) layers that the target's checkpoint holds."""

from __future__ import annotations

import logging
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.mtp.settings import MtpSettings
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds, Memory

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter

_LOG = logging.getLogger(__name__)


def _hosting() -> ModuleType:
    """The module that reads the layers.

    Raises:
        FailedPreconditionError: transformers is too old.
    """
    try:
        return import_module("betoken.drafters.mtp.hosting")
    except ImportError as error:  # the worker itself runs with older versions
        text = f"--attached-drafters = mtp: needs MTP layers of transformers, as in 5.23: {error}"
        raise FailedPreconditionError(text) from error


def _memory(settings: Any) -> Memory:
    memory: Memory = _hosting().memory_of(settings)
    return memory


def _make(host: DrafterContext) -> Drafter:
    drafter: Drafter = _hosting().make_drafter(host)
    return drafter


def _is_built_in(settings: Any) -> bool:
    try:
        is_built_in: bool = _hosting().is_built_in(settings)
    except FailedPreconditionError as error:
        _LOG.info("%s", error)
        return False
    return is_built_in


SPEC = DrafterSpec(
    name="mtp",
    make=_make,
    explains="accepted from the target's MTP layer",
    colour="bright_magenta underline",
    can_attach=True,
    can_host=False,
    is_built_in=_is_built_in,
    memory=_memory,
    features=FeatureNeeds(layers=lambda settings, num_layers: (num_layers,), steers_by_whole_text=True, embeds=True),
    settings=MtpSettings,
)
