"""Puts packed weights of an earlier start in the place of a checkpoint's. It knows plans, not files or kernels."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from betoken.engine.weights.stored import Narrow, Stored, StoredWeight
from betoken.kernels.cpu.grouped import PackedGrouped

FindPacked = Callable[[str], Mapping[str, PackedGrouped]]
"""Identifier of a checkpoint's weights -> packed ones of an earlier start, by the paths of their layers."""


def use_packed(packed: Mapping[str, PackedGrouped]) -> Narrow:
    """Return what replaces the weights of a plan by these, by the paths of their layers."""

    def narrow(model: Any, state: dict[str, Any], stored: Mapping[str, Stored]) -> dict[str, Stored]:
        replaced: dict[int, StoredWeight] = {}
        plan: dict[str, Stored] = {}
        for path, weight in stored.items():
            plan[path] = weight
            if isinstance(weight, StoredWeight) and weight.fetch is not None and path in packed:
                found = replaced.setdefault(id(weight), _replaced(weight, packed[path]))
                plan[path] = found
        return plan

    return narrow


def _replaced(weight: StoredWeight, packed: PackedGrouped) -> StoredWeight:
    return replace(weight, read=lambda tensors: packed)
