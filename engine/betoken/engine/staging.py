"""Columns of numbers to a device in one copy that the host does not wait for. It knows no meaning of the columns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT = 16


def to_device(columns: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The columns as tensors on a device, dtypes kept.

    On a GPU they share one piece of pinned memory on the way. On a CPU they share the arrays' own memory.
    """
    if device.type != "cuda":
        return [torch.from_numpy(column).to(device) for column in columns]
    return unpack(pack(columns, is_pinned=True).to(device, non_blocking=True), columns)


def pack(columns: Sequence[NDArray[Any]], is_pinned: bool) -> Tensor:
    """All columns behind one another as bytes, each from a multiple of 16 on."""
    # The allocator of pinned memory keeps a piece until the copy out of it has run.
    packed = torch.empty(sum(map(_padded_bytes, columns)), dtype=torch.uint8, pin_memory=is_pinned)
    target = packed.numpy()
    start = 0
    for column in columns:
        target[start : start + column.nbytes] = np.ascontiguousarray(column).view(np.uint8).ravel()
        start += _padded_bytes(column)
    return packed


def unpack(packed: Tensor, columns: Sequence[NDArray[Any]]) -> list[Tensor]:
    """Views of packed bytes with the columns' shapes and dtypes."""
    tensors = []
    start = 0
    for column in columns:
        dtype = torch.from_numpy(column).dtype
        tensors.append(packed[start : start + column.nbytes].view(dtype).view(column.shape))
        start += _padded_bytes(column)
    return tensors


def _padded_bytes(column: NDArray[Any]) -> int:
    return -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
