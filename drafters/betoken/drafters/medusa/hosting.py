"""Makes the Medusa drafter of a verify worker: its own heads, and the folder of adapters."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.medusa.adapters import Adapter, AdapterStore, describe
from betoken.drafters.medusa.drafter import MedusaDrafter
from betoken.drafters.medusa.layouts import PREFIX_IN_TARGET, HeadsLayout, lay_out
from betoken.drafters.medusa.module import MedusaHeads
from betoken.drafters.medusa.settings import MedusaSettings
from betoken.drafters.spec import DrafterContext
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.fingerprint import weight_files
from betoken.engine.weights.tensor_files import FileTensor, open_tensors

logger = logging.getLogger(__name__)


def make_drafter(host: DrafterContext) -> MedusaDrafter:
    """The drafter, with its own heads in memory.

    Raises:
        FailedPreconditionError: the heads that --medusa names, or those in the target's checkpoint, cannot be used; or
            there are none, and no folder of adapters.
    """
    options, target = host.settings, host.target
    own = _own_heads(options.medusa, target)
    if own is None and options.adapter_dir is None:
        raise FailedPreconditionError(
            "--medusa or --adapter-dir: must be given for the drafter `medusa`, as the target's checkpoint has no heads"
        )
    if own is None:
        logger.warning("requests that name no adapter go without drafts of `medusa`: --medusa is not given")
    store = AdapterStore(options.adapter_dir, target, options.max_adapters)
    settings = MedusaSettings.of_options(options)
    return MedusaDrafter(own, store, target.info.vocab_size, settings)


def _own_heads(directory: Path | None, target: ModelRunner) -> Adapter | None:
    place = f"--medusa = {directory}" if directory is not None else f"{PREFIX_IN_TARGET}* in the target"
    try:
        layout = describe(directory, target) if directory is not None else _in_target(target)
        if layout is None:
            return None
        return Adapter("", layout, MedusaHeads(layout, target.parts))
    except (ModelRefusedError, OSError, ValueError) as error:
        raise FailedPreconditionError(f"{place}: {error}") from error


def _in_target(target: ModelRunner) -> HeadsLayout | None:
    """Heads that were trained with the target and are stored in its checkpoint; None without any."""
    path = target.info.path
    files = weight_files(path) if path is not None and path.is_dir() else []
    tensors: Mapping[str, FileTensor] = {
        name: tensor
        for file in files
        for name, tensor in open_tensors(file).items()
        if name.startswith(PREFIX_IN_TARGET)
    }
    if not tensors:
        return None
    return lay_out(tensors, target.parts.hidden_size, target.info.vocab_size)
