"""Short causal convolution of a flat ragged batch, chains and trees, over paged inputs. It knows no models.

A row needs the inputs of the last few positions on its path. They are stored in the pages, each in its token's slot, so
that a rejected draft is forgotten as its keys are.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from betoken.kernels import dispatch
from betoken.kernels.cpu import CPU_DTYPES, load_cpu_kernels
from betoken.kernels.rows import PagedRows
from betoken.kernels.short_conv.reference import short_conv_reference

__all__ = ["short_conv", "short_conv_native", "short_conv_reference"]

_TRITON = dispatch.triton("betoken.kernels.short_conv.kernel", "short_conv_triton")


def short_conv(inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: PagedRows) -> Tensor:
    """Sum of the last L inputs on each row's path, each channel with its own weights.

    y[r, c] = bias[c] + sum over j of weight[j, c] * x[position of r - (L - 1) + j, c], where x before position 0 is 0.
    The sum runs in float32 from the oldest input to the row's own, then the bias is added, and it is rounded once. A
    row depends on its path alone: alone, in a prefill chunk or as a node of a tree it has the same bits.

    Args:
        inputs: [num_pages, page_size, C]; the rows' own are written before (`kv_write`, as keys without values).
        weight: [L, C], from the oldest input to the row's own; L at least 1; dtype of `inputs`.
        bias: [C], dtype of `inputs`.
        rows: positions and slots of the rows and their inputs.

    Returns:
        [R, C], dtype of `inputs`.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.

    Source:
        Gated short convolution as in LFM2, arXiv:2511.23404.
    """
    _check(inputs, weight, bias)
    table: dict[dispatch.PathName, Callable[..., Tensor]] = {"reference": short_conv_reference, "triton": _TRITON}
    if inputs.device.type == "cpu" and inputs.dtype in CPU_DTYPES and load_cpu_kernels() is not None:
        table["native"] = short_conv_native
    _, implementation = dispatch.select(inputs.device, table)
    return implementation(inputs, weight, bias, rows)


def short_conv_native(inputs: Tensor, weight: Tensor, bias: Tensor | None, rows: PagedRows) -> Tensor:
    """`short_conv` by the CPU kernels, which must have been loaded."""
    out: Tensor = torch.ops.betoken.paged_short_conv(
        inputs,
        weight,
        bias,
        rows.positions,
        rows.row_segments,
        rows.page_starts,
        rows.page_ids,
        None if rows.paths is None else rows.paths.starts,
        None if rows.paths is None else rows.paths.slots,
    )
    return out


def _check(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if inputs.dim() != 3 or not inputs.is_contiguous():
        raise ValueError(f"inputs must be dense [num_pages, page_size, C], got {list(inputs.shape)}")
    given = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    for name, tensor in given.items():
        if tensor.shape[-1:] != inputs.shape[2:] or tensor.dtype != inputs.dtype or not tensor.is_contiguous():
            raise ValueError(
                f"{name} {list(tensor.shape)} {tensor.dtype} does not fit inputs {list(inputs.shape)} {inputs.dtype}"
            )
    if weight.dim() != 2 or not len(weight):
        raise ValueError(f"weight must be [L, C] with L at least 1, got {list(weight.shape)}")
    if bias is not None and bias.dim() != 1:
        raise ValueError(f"bias must be [C], got {list(bias.shape)}")
