"""Argument checks shared by the ops.

Reading values from a device costs a synchronisation, so they are checked on CPU only.
"""

from __future__ import annotations

import torch

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SAMPLING_COLUMNS = (
    ("temperature", torch.float32),
    ("top_k", torch.int32),
    ("top_p", torch.float32),
    ("min_p", torch.float32),
)
NOISE_COLUMNS = (("seeds", torch.int64), ("positions", torch.int64))


def check_logits(logits: torch.Tensor) -> None:
    """Raises ValueError unless the logits are contiguous [R, V], V at least 1, of a type that models give."""
    if logits.dim() != 2 or logits.dtype not in _FLOATS or not logits.is_contiguous() or logits.shape[1] < 1:
        raise ValueError(
            f"logits must be contiguous [R, V] bfloat16, float16 or float32, got {list(logits.shape)} {logits.dtype}"
        )


def check_rows(x: torch.Tensor) -> None:
    """Raises ValueError unless x is contiguous [R, K], R and K at least 1, of a type that models compute in."""
    if x.dim() != 2 or x.dtype not in _FLOATS or not x.is_contiguous() or 0 in x.shape:
        raise ValueError(
            f"x must be contiguous [R, K] bfloat16, float16 or float32, at least [1, 1],"
            f" got {list(x.shape)} {x.dtype} with strides {list(x.stride())}"
        )


def check_tensor(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError unless the tensor is contiguous, of the shape and the dtype, and on the device."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous {list(shape)} {dtype}, got {list(tensor.shape)} {tensor.dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")


def check_column(name: str, tensor: torch.Tensor, length: int, dtype: torch.dtype, device: torch.device) -> None:
    """`check_tensor` of one dimension."""
    check_tensor(name, tensor, (length,), dtype, device)


def check_columns(
    logits: torch.Tensor, columns: tuple[tuple[str, torch.dtype], ...], tensors: tuple[torch.Tensor, ...]
) -> None:
    """Raises ValueError unless there is one [R] tensor of the right dtype per column."""
    for (name, dtype), tensor in zip(columns, tensors, strict=True):
        check_column(name, tensor, logits.shape[0], dtype, logits.device)


def check_chains(
    logits: torch.Tensor, target_ids: torch.Tensor, draft_ids: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Raise ValueError unless the logits have one row per draft token and one per chain."""
    num_rows, vocab_size = logits.shape
    num_drafts = draft_ids.numel()
    num_blocks = offsets.numel() - 1
    check_column("draft_ids", draft_ids, num_drafts, torch.int64, logits.device)
    check_column("offsets", offsets, num_blocks + 1, torch.int64, logits.device)
    check_column("target_ids", target_ids, num_rows, torch.int64, logits.device)
    if num_blocks < 0 or num_rows != num_drafts + num_blocks:
        raise ValueError(
            f"logits must have one row per draft token and block, {num_drafts + num_blocks}, got {num_rows}"
        )
    check_offsets("offsets", offsets, num_drafts)
    check_ids("draft_ids", draft_ids, vocab_size)


def check_offsets(name: str, offsets: torch.Tensor, end: int) -> None:
    """Raises ValueError unless the offsets go from 0 to `end` without decreasing; on CPU only."""
    if offsets.device.type != "cpu":
        return
    if int(offsets[0]) != 0 or int(offsets[-1]) != end or bool((offsets.diff() < 0).any()):
        raise ValueError(f"{name} must go from 0 to {end} without decreasing, got {offsets.tolist()}")


def check_ids(name: str, ids: torch.Tensor, vocab_size: int) -> None:
    """Raises ValueError unless 0 <= id < vocab_size for all ids; on CPU only."""
    if ids.device.type == "cpu" and ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab_size):
        raise ValueError(f"{name} must be 0 to {vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}")
