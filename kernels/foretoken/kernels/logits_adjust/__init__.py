"""Sparse adjustments and bitmasks applied to rows of logits, in the order `transformers` applies its own.

It knows no rules: which id gets which bias, scale or penalty is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretoken.kernels import dispatch
from foretoken.kernels.logits_adjust import reference

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., torch.Tensor]] = {"reference": reference.logits_adjust}

_LOGITS_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def logits_adjust(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    penalty: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Applies per-row lists of adjustments; a new float32 tensor, the input is left alone.

    An entry (row, id) turns its float32 logit x into y - penalty, where y is x + bias divided by scale if x + bias is
    not negative and multiplied by it otherwise. Then ids whose bit is 0 in `allowed` become -inf.

    Args:
        logits: [R, V] bfloat16, float16 or float32, rows contiguous.
        row_offsets: [R + 1] int64; row r owns the entries [row_offsets[r], row_offsets[r + 1]).
        ids: [N] int64 vocabulary ids, unique within a row.
        bias: [N] float32. Neutral: 0.
        scale: [N] float32, above 0: the repetition penalty. Neutral: 1.
        penalty: [N] float32; +inf masks the id. Neutral: 0.
        allowed: [R, ceil(V / 32)] int32 bitmask, bit v & 31 of word v >> 5; None allows all.
    Returns:
        [R, V] float32.
    Raises:
        ValueError: a shape, stride, dtype or device other than above.
    """
    if logits.dim() != 2 or logits.dtype not in _LOGITS_DTYPES or not logits.is_contiguous():
        raise ValueError(
            f"logits must be contiguous [R, V] bfloat16, float16 or float32, got {list(logits.shape)} {logits.dtype}"
        )
    num_rows, vocab_size = logits.shape
    if row_offsets.shape != (num_rows + 1,) or row_offsets.dtype != torch.int64:
        raise ValueError(
            f"row_offsets must be [{num_rows + 1}] int64, got {list(row_offsets.shape)} {row_offsets.dtype}"
        )
    if ids.dim() != 1 or ids.dtype != torch.int64:
        raise ValueError(f"ids must be [N] int64, got {list(ids.shape)} {ids.dtype}")
    for name, values in (("bias", bias), ("scale", scale), ("penalty", penalty)):
        if values.shape != ids.shape or values.dtype != torch.float32 or not values.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous [{ids.shape[0]}] float32, got {list(values.shape)} {values.dtype}"
            )
    num_words = -(-vocab_size // 32)
    if allowed is not None and (allowed.shape != (num_rows, num_words) or allowed.dtype != torch.int32):
        raise ValueError(f"allowed must be [{num_rows}, {num_words}] int32, got {list(allowed.shape)} {allowed.dtype}")
    for tensor in (row_offsets, ids, bias, scale, penalty, allowed):
        if tensor is not None and tensor.device != logits.device:
            raise ValueError(f"all arguments must be on {logits.device}, got one on {tensor.device}")
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    return implementation(logits, row_offsets, ids, bias, scale, penalty, allowed)
