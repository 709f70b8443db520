"""The check of layers that round their rows to int8: each product against its definition, on some rows and outputs.

A whole forward says little about them: one code that is rounded the other way changes codes of all later layers.
"""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.cpu.experts import packed_product
from betoken.engine.cpu.grouped_linear import PackedGroupedLinear
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.experts import bias_of, up_name
from betoken.engine.weights.layers import in_orders
from betoken.kernels.linear_grouped.int8_rows import rounded

_NUM_ROWS, _NUM_OUTPUTS = 5, 64
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Mean difference of a result, as a part of the mean size of a result: order of float sums, rounding of the type."""


@torch.inference_mode()
def check_rounding_layers(model: Any) -> None:
    """Compare the layers of a model whose `rounds_rows` is set with products of rounded rows and dequantised weights.

    Raises:
        ModelRefusedError: a layer differs by more than its type's rounding explains.
    """
    for path, module in model.named_modules():
        if not getattr(module, "rounds_rows", False):
            continue
        if isinstance(module, PackedGroupedLinear):
            _check_linear(path, module, model.dtype)
        else:
            for name in (up_name(module), "down_proj"):
                _check_first_expert(f"{path}.{name}", module, name, model.dtype)


def _check_linear(path: str, layer: PackedGroupedLinear, dtype: torch.dtype) -> None:
    rows = _sample_rows(layer.num_inputs, dtype)
    ordered = rows if layer.order is None else rows.index_select(-1, layer.order)
    weight = (layer.packed, layer.num_outputs, layer.num_inputs, layer.format)
    _compare(path, layer(rows), _expected(ordered, weight, layer.bias))


def _check_first_expert(path: str, module: Any, name: str, dtype: torch.dtype) -> None:
    num_inputs = getattr(module, f"num_inputs_{name}")
    rows, ids = _sample_rows(num_inputs, dtype), torch.zeros(_NUM_ROWS, dtype=torch.int64)
    ordered = in_orders(rows, getattr(module, f"orders_{name}"), ids)
    bias = bias_of(module, name)
    packed, num_outputs = getattr(module, f"packed_{name}")[0], getattr(module, f"num_{name}")
    weight = (packed, num_outputs, num_inputs, getattr(module, f"format_{name}"))
    expected = _expected(ordered, weight, None if bias is None else bias[0])
    _compare(path, packed_product(module, name, rows, ids), expected)


def _sample_rows(num_inputs: int, dtype: torch.dtype) -> Tensor:
    """[R, K], normally distributed."""
    return torch.randn(_NUM_ROWS, num_inputs, generator=torch.Generator().manual_seed(num_inputs)).to(dtype)


def _expected(rows: Tensor, weight: tuple[Tensor, int, int, int], bias: Tensor | None) -> Tensor:
    """Results [R, 64 at most] of rounded rows, float32."""
    ids = _sample_outputs(weight[1])
    sums: Tensor = rounded(rows) @ torch.ops.betoken.grouped_rows(ids, *weight).T
    return sums if bias is None else sums + bias[ids].float()


def _sample_outputs(num_outputs: int) -> Tensor:
    """Outputs that are compared, the first and the last among them."""
    return torch.linspace(0, num_outputs - 1, min(_NUM_OUTPUTS, num_outputs)).long()


def _compare(path: str, results: Tensor, expected: Tensor) -> None:
    limit = _TOLERANCES[results.dtype] * expected.abs().mean().item() + 1e-6
    ours = results[:, _sample_outputs(results.shape[1])].float()
    difference = (ours - expected).abs().mean().item()
    if not difference <= limit:
        raise ModelRefusedError(
            f"{path}: int8 activations give results {difference:.3g} from their definition on average"
            f" (limit {limit:.3g})"
        )
