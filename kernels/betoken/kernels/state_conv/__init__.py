"""Short causal convolution of a flat ragged batch, chains and trees, whose earlier inputs wait in rings.

A row needs the inputs of the last few positions on its path. Inputs of this forward are arguments, earlier ones are in
the sequence's ring, so that a rejected draft is forgotten by writing over it. It knows no models.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.kernels import dispatch
from betoken.kernels.cpu import CPU_DTYPES
from betoken.kernels.cpu.recurrent import load_recurrent_kernels
from betoken.kernels.state_conv.reference import state_conv_reference
from betoken.kernels.state_rows import StateRows

__all__ = ["state_conv", "state_conv_native", "state_conv_reference"]

_TRITON = dispatch.triton("betoken.kernels.state_conv.kernel", "state_conv_triton")


def state_conv(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: StateRows) -> Tensor:
    """Sum of the last L inputs on each row's path, each channel with its own weights; then store the inputs.

    y[r, c] = bias[c] + sum over j of weight[j, c] * x[position of r - (L - 1) + j, c], where x before position 0 is 0.
    The sum runs in float32 from the oldest input to the row's own, then the bias is added, and it is rounded once.
    Afterwards the ring of a sequence holds its last Q inputs.

    Args:
        x: [R, C] inputs of the rows, which may be a part of wider rows.
        weight: [L, C], from the oldest input to the row's own; dtype of `x`.
        bias: [C], dtype of `x`.
        ring: [N, Q, C], changed in place; dtype of `x`. Q is at least L - 1 plus the slots after `committed`.
        rows: positions of the rows and slots of their states.

    Returns:
        [R, C], dtype of `x`.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.

    Source:
        Short convolutions before a recurrence as in Mamba, arXiv:2312.00752, section 3.4.
    """
    _check(x, weight, bias, ring)
    table: dict[dispatch.PathName, Callable[..., Tensor]] = {"reference": state_conv_reference, "triton": _TRITON}
    if x.device.type == "cpu" and x.dtype in CPU_DTYPES and load_recurrent_kernels() is not None:
        table["native"] = state_conv_native
    _, implementation = dispatch.select(x.device, table)
    return implementation(x, weight, bias, ring, rows)


def state_conv_native(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor, rows: StateRows) -> Tensor:
    """`state_conv` by the CPU kernels, which must have been loaded."""
    out: Tensor = torch.ops.betoken.state_conv_over(x, weight, bias, ring, *columns_of(rows))
    return out


def columns_of(rows: StateRows) -> list[Tensor | None]:
    """The rows as the CPU operators take them."""
    paths = [None, None] if rows.paths is None else [rows.paths.starts, rows.paths.slots]
    return [
        rows.positions,
        rows.row_segments,
        torch.stack([rows.states, rows.applied, rows.first_slots, rows.committed]),
        *paths,
    ]


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, ring: Tensor) -> None:
    if x.dim() != 2 or weight.dim() != 2 or ring.dim() != 3 or not len(weight):
        raise ValueError(
            f"x {list(x.shape)}, weight {list(weight.shape)}, ring {list(ring.shape)} must be [R, C], [L, C]"
            " with L at least 1, [N, Q, C]"
        )
    for name, tensor in {"weight": weight, "ring": ring, **({} if bias is None else {"bias": bias})}.items():
        if tensor.shape[-1] != x.shape[1] or tensor.dtype != x.dtype or not tensor.is_contiguous():
            raise ValueError(f"{name} {list(tensor.shape)} {tensor.dtype} does not fit x {list(x.shape)} {x.dtype}")
    if ring.shape[1] < len(weight) - 1:
        raise ValueError(f"ring holds {ring.shape[1]} inputs, a sum of {len(weight)} needs {len(weight) - 1}")
