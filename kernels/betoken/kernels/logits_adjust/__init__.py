"""Sparse adjustments and bitmasks applied in place to rows of logits, in the order `transformers` applies its own.

It knows no rules: which id gets which bias, scale or penalty is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import checks, dispatch, native
from betoken.kernels.logits_adjust import reference

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., None]] = {
    "reference": reference.logits_adjust,
    "native": native.logits_adjust,
    "triton": dispatch.triton("betoken.kernels.logits_adjust.kernel", "logits_adjust"),
}


def logits_adjust(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    penalty: torch.Tensor,
    allowed: torch.Tensor | None = None,
) -> None:
    """Applies per-row lists of adjustments in place; what no entry and no mask names is not touched.

    An entry (row, id) turns its float32 logit x into y - penalty. With z = x + bias, y is z / scale if z is not
    negative, and z * scale otherwise. Then ids whose bit is 0 in `allowed` become -inf.

    Args:
        logits: [R, V] float32, contiguous: in a narrower type the adjustments would be rounded.
        row_offsets: [R + 1] int64; row r owns the entries [row_offsets[r], row_offsets[r + 1]).
        ids: [N] int64 vocabulary ids, unique within a row.
        bias: [N] float32. Neutral: 0.
        scale: [N] float32, above 0: the repetition penalty. Neutral: 1.
        penalty: [N] float32; +inf masks the id. Neutral: 0.
        allowed: [R, ceil(V / 32)] int32 bitmask, bit v & 31 of word v >> 5; None allows all ids.
    Raises:
        ValueError: a shape, stride, dtype or device other than above; on CPU also ids or offsets out of range.
    """
    if logits.dim() != 2:
        raise ValueError(f"logits must be [R, V], got {list(logits.shape)}")
    num_rows, vocab_size = logits.shape
    num_entries = ids.shape[0] if ids.dim() == 1 else -1
    expected = [
        ("logits", logits, (num_rows, vocab_size), torch.float32),
        ("row_offsets", row_offsets, (num_rows + 1,), torch.int64),
        ("ids", ids, (num_entries,), torch.int64),
        ("bias", bias, (num_entries,), torch.float32),
        ("scale", scale, (num_entries,), torch.float32),
        ("penalty", penalty, (num_entries,), torch.float32),
    ]
    if allowed is not None:
        expected.append(("allowed", allowed, (num_rows, -(-vocab_size // 32)), torch.int32))
    for name, tensor, shape, dtype in expected:
        checks.check_tensor(name, tensor, shape, dtype, logits.device)
    _, implementation = dispatch.select(logits.device, IMPLEMENTATIONS)
    implementation(logits, row_offsets, ids, bias, scale, penalty, allowed)
