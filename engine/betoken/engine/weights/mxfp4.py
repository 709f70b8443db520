"""Experts of mixtures that are stored in MXFP4: numbers of 4 bits, 32 of which share a power of two.

Source: Open Compute Project, Microscaling Formats v1.0; transformers, integrations/mxfp4.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.experts import is_experts, up_name
from betoken.engine.weights.stored import Plan, Stored, StoredExperts, StoredWeight
from betoken.engine.weights.stored_files import Files, StoredTensors, by_layer
from betoken.kernels.linear_grouped import Grouped

METHOD = "mxfp4"
_GROUP = 32


def plan_of(files: Files) -> Plan:
    """Modules of experts for whose weights there are blocks and scales; all else stays dense."""

    def plan(model: Any) -> dict[str, Stored]:
        specs, found = by_layer(files), {}
        for path, module in model.named_modules():
            for name in (up_name(module), "down_proj") if is_experts(module) else ():
                if f"{name}_blocks" in specs.get(path, {}):
                    found[f"{path}.{name}"] = _stored(files, path, name, module, specs[path])
        if unknown := sorted(
            key for key in files if key.endswith("_blocks") and key.removesuffix("_blocks") not in found
        ):
            raise ModelRefusedError(f"{METHOD}: {unknown[0]}: not a weight of {type(model).__name__}'s experts")
        return dict(found)

    return plan


def _stored(files: Files, path: str, name: str, module: Any, specs: Mapping[str, Any]) -> StoredExperts:
    num_experts, height, width = getattr(module, name).shape
    num_outputs, num_inputs = (width, height) if module.is_transposed else (height, width)
    tensors = StoredTensors(METHOD, path, num_experts * num_outputs, num_inputs, specs)
    if num_inputs % _GROUP:
        raise tensors.refuse(f"{name}_blocks", f"{num_inputs} inputs, not a multiple of {_GROUP}")
    lead = (num_experts, num_outputs, num_inputs // _GROUP)
    taken = {
        f"{name}_blocks": tensors.take(f"{name}_blocks", [(*lead, _GROUP // 2)], torch.uint8),
        f"{name}_scales": tensors.take(f"{name}_scales", [lead], torch.uint8),
    }
    weight = StoredWeight(
        taken,
        partial(_read, tensors, name),
        fetch=lambda part: files[f"{path}.{part}"].read(),
        keys=tuple(f"{path}.{part}" for part in taken),
    )
    return StoredExperts(num_experts, (weight,))


def _read(tensors: StoredTensors, name: str, given: Mapping[str, Tensor]) -> Grouped:
    return tensors.grouped(
        kind="e2m1",
        group=_GROUP,
        values=given[f"{name}_blocks"].reshape(tensors.num_outputs, -1),
        scales=given[f"{name}_scales"].reshape(tensors.num_outputs, -1).view(torch.float8_e8m0fnu),
    )
