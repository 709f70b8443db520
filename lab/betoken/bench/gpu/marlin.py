"""vLLM's Marlin product with 4-bit weights, if vLLM is installed: another side of a case.

It knows the layouts of GPTQ and of the package's own helpers; which shapes are measured it does not know.
"""

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from betoken.bench.gpu.case import Side
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.codes import unpack

NAME = "vllm Marlin"
_MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"
_TOLERANCE = 2e-2
"""Largest difference from the product of the dequantised weight, as a part of its largest value."""


class _Packed(NamedTuple):
    """A weight in the package's layout, and what its product is given besides."""

    words: Tensor
    scales: Tensor
    nothing: Tensor
    workspace: Tensor

    @classmethod
    def of(cls, weight: Grouped) -> "_Packed":
        marlin, operators = import_module(_MARLIN), import_module("vllm._custom_ops")
        num_outputs, num_inputs = weight.shape
        device = weight.values.device
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        words = operators.gptq_marlin_repack(gptq_words(weight), nothing, num_inputs, num_outputs, 4)
        scales = marlin.marlin_permute_scales(weight.scales.T.contiguous(), num_inputs, num_outputs, weight.group)
        return cls(words, scales, nothing, marlin.marlin_make_workspace_new(device))


def gptq_words(weight: Grouped) -> Tensor:
    """Codes of four bits as GPTQ keeps them: int32 [K / 8, N], eight inputs a word, the first in the lowest bits.

    Source: AutoGPTQ, qlinear_cuda_old.py.
    """
    num_outputs, num_inputs = weight.shape
    codes = unpack(weight.values, 4, num_inputs).T.reshape(num_inputs // 8, 8, num_outputs).to(torch.int64)
    shifts = torch.arange(0, 32, 4, device=codes.device)[:, None]
    return (codes << shifts).sum(1).to(torch.int32)


def marlin_side() -> Side:
    """The side; packing and a comparison with the dequantised weight run at the first call, which is not timed.

    Its call raises ModuleNotFoundError without the package, and ValueError if the product differs.
    """
    packed: dict[int, _Packed] = {}

    def product(x: Tensor, weight: Grouped) -> Tensor:
        own = packed[id(weight)]
        types: Any = import_module("vllm.scalar_type")
        out: Tensor = import_module(_MARLIN).apply_gptq_marlin_linear(
            input=x,
            weight=own.words,
            weight_scale=own.scales,
            weight_zp=own.nothing,
            g_idx=own.nothing,
            g_idx_sort_indices=own.nothing,
            workspace=own.workspace,
            wtype=types.scalar_types.uint4b8,
            output_size_per_partition=weight.shape[0],
            input_size_per_partition=weight.shape[1],
            is_k_full=True,
        )
        return out

    def call(x: Tensor, weight: Grouped, dense: Tensor) -> object:
        if id(weight) not in packed:
            packed[id(weight)] = _Packed.of(weight)
            expected = x.float() @ weight.dequantised().float().T
            difference = (product(x, weight).float() - expected).abs().max() / expected.abs().max()
            if not difference <= _TOLERANCE:
                raise ValueError(f"another product: {float(difference):.3g} of the largest value away")
        return product(x, weight)

    return Side(NAME, call)
