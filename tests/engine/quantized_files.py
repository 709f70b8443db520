"""Tiny quantised checkpoints: by the packages of compressed-tensors and bitsandbytes, others by what their formats say.

Each writer turns a plain directory into a quantised one and returns the numbers that the format's definition gives its
layers, computed another way than the engine does.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise, int8_vectorwise_dequant, quantize_4bit
from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
from compressed_tensors.compressors.naive_quantized import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file, save_file
from torch import Tensor

_COMPRESSORS = {
    "pack-quantized": PackedQuantizationCompressor,
    "int-quantized": IntQuantizationCompressor,
    "float-quantized": FloatQuantizationCompressor,
}

Stored = tuple[dict[str, Tensor], Tensor]
"""Stored tensors of a layer, by name, and its dequantised numbers [N, K], float32."""


def write_quantized(directory: Path, config: dict[str, Any], store: Callable[[Tensor], Stored]) -> dict[str, Tensor]:
    """Quantise the linear layers of a plain checkpoint in place; returns their numbers by path."""
    weights, numbers = load_file(directory / "model.safetensors"), {}
    stored = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        path = name.removesuffix(".weight")
        tensors, numbers[path] = store(stored.pop(name).float())
        stored |= {f"{path}.{part}": tensor.contiguous() for part, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(described | {"quantization_config": config}))
    return numbers


def scales_of(weight: Tensor, group: int, largest: float, dtype: torch.dtype) -> Tensor:
    """[N, ceil(K / group)]."""
    parts = torch.nn.functional.pad(weight, (0, -weight.shape[1] % group)).unflatten(1, (-1, group))
    return (parts.abs().amax(2) / largest).to(dtype)


def draw_groups(num_inputs: int, group: int, seed: int = 2) -> Tensor:
    """The group of each input, int32: as many inputs of each, in no order."""
    places = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(seed))
    return (places // group).int()


def draw_zeros(shape: torch.Size, bits: int) -> Tensor:
    """Zeros about the middle of the codes, int32."""
    middle, most = 1 << bits - 1, 1 if bits == 2 else 2
    return torch.randint(
        middle - most, middle + most + (bits > 2), shape, generator=torch.Generator().manual_seed(1)
    ).int()


def compressed_tensors_config(form: str, **weights: Any) -> dict[str, Any]:
    """As the package writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def store_compressed_tensors(form: str, weights: dict[str, Any], dtype: torch.dtype) -> Callable[[Tensor], Stored]:
    """By the package itself, with scales of a dtype."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor: Any = _COMPRESSORS[form]

    def store(weight: Tensor) -> Stored:
        state = {"weight": weight, "weight_scale": _package_scales(weight, weights, dtype)}
        if not weights.get("symmetric", True):
            zeros = draw_zeros(state["weight_scale"].shape, weights["num_bits"]) - (1 << weights["num_bits"] - 1)
            state["weight_zero_point"] = zeros.to(torch.int8)
        compressed = compressor.compress(state, scheme)
        exact = compressed | {"weight_scale": compressed["weight_scale"].float()}
        return compressed, compressor.decompress(exact, scheme)["weight"]

    return store


def store_float4(is_mx: bool) -> Callable[[Tensor], Stored]:
    """NVFP4 or MXFP4 by the package itself."""
    compressor: Any = MXFP4PackedCompressor if is_mx else NVFP4PackedCompressor
    group = 32 if is_mx else 16
    arguments = float4_config(is_mx)["config_groups"]["group_0"]["weights"]
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))

    def store(weight: Tensor) -> Stored:
        scales = scales_of(weight, group, 6.0, torch.float32)
        total = (448 / scales.max()).reshape(1)
        state = {"weight": weight, "weight_scale": scales.log2().ceil().exp2()}
        if not is_mx:
            rounded = (scales * total).to(torch.float8_e4m3fn).float()
            state = {"weight": weight, "weight_scale": rounded, "weight_global_scale": total}
        stored = compressor.compress(state, scheme)
        codes = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
        options: dict[str, Any] = {"args": scheme.weights, "dtype": torch.float32}
        numbers = dequantize(codes, state["weight_scale"], global_scale=None if is_mx else total, **options)
        return stored | ({} if is_mx else {"input_global_scale": total.clone()}), numbers

    return store


def float4_config(is_mx: bool) -> dict[str, Any]:
    """As the package writes it."""
    own = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    if not is_mx:
        own = {"strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    form = f"{'mx' if is_mx else 'nv'}fp4-pack-quantized"
    return compressed_tensors_config(form, num_bits=4, type="float", symmetric=True, **own)


def modelopt_config(algorithm: str) -> dict[str, Any]:
    """As Model Optimizer writes it."""
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": {"name": "modelopt"},
        "ignore": ["lm_head"],
    }


def store_modelopt(algorithm: str) -> Callable[[Tensor], Stored]:
    """With the scales of activations and KV that it adds."""

    def more() -> dict[str, Tensor]:
        return {"input_scale": torch.tensor(0.5), "k_scale": torch.tensor(1.0)}

    def nvfp4(weight: Tensor) -> Stored:
        stored, _ = store_float4(is_mx=False)(weight)
        total, codes = 1 / stored["weight_global_scale"].reshape(()), stored["weight_packed"]
        scales = stored["weight_scale"]
        numbers = unpack_fp4_from_uint8(codes, *weight.shape, dtype=torch.float32)
        numbers *= (scales.float() * total).repeat_interleave(16, dim=1)
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": total, **more()}, numbers

    def fp8(weight: Tensor) -> Stored:
        stored, numbers = store_fp8(None)(weight)
        return {"weight": stored["weight"], "weight_scale": stored["weight_scale_inv"], **more()}, numbers

    return nvfp4 if algorithm == "NVFP4" else fp8


def store_ordered(group: int) -> Callable[[Tensor], Stored]:
    """compressed-tensors of 4 bits with `weight_g_idx`, which its package wrote until 0.15."""

    def store(weight: Tensor) -> Stored:
        scales = scales_of(weight, group, 7.0, torch.bfloat16)
        zeros, groups = draw_zeros(scales.shape, 4), draw_groups(weight.shape[1], group)
        codes, numbers = _rounded(weight, scales, zeros, groups, 4)
        places = list(range(8))
        return {
            "weight_packed": _words(codes, 4, places),
            "weight_scale": scales,
            "weight_zero_point": _words(zeros.T, 4, places).T,
            "weight_g_idx": groups,
            "weight_shape": torch.tensor(weight.shape),
        }, numbers

    return store


def _package_scales(weight: Tensor, weights: dict[str, Any], dtype: torch.dtype) -> Tensor:
    largest = 448.0 if weights.get("type") == "float" else float((1 << weights["num_bits"] - 1) - 1)
    strategy = weights["strategy"]
    if strategy == "tensor":
        return (weight.abs().amax() / largest).reshape(1).to(dtype)
    if strategy == "block":
        height, width = weights["block_structure"]
        rows, columns = -weight.shape[0] % height, -weight.shape[1] % width
        padded = torch.nn.functional.pad(weight, (0, columns, 0, rows))
        return (padded.unflatten(1, (-1, width)).unflatten(0, (-1, height)).abs().amax((1, 3)) / largest).to(dtype)
    return scales_of(weight, weight.shape[1] if strategy == "channel" else weights["group_size"], largest, dtype)


def _rounded(weight: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes [N, K] int32, and the numbers; `groups` [K] names each input's."""
    spread, zero = scales.float()[:, groups], zeros.float()[:, groups]
    codes = (weight / spread + zero).round().clamp(0, (1 << bits) - 1)
    return codes.int(), (codes - zero) * spread


def _words(codes: Tensor, bits: int, places: list[int]) -> Tensor:
    """[R, C] -> int32 [R, C / places], code j of a word at bit bits * places[j]."""
    parts = codes.long().unflatten(1, (-1, len(places)))
    words = sum((parts[..., j] & (1 << bits) - 1) << bits * place for j, place in enumerate(places))
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()  # type: ignore[arg-type, operator]


def gptq_config(bits: int, group: int, **others: Any) -> dict[str, Any]:
    """As AutoGPTQ writes it."""
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False} | others


def store_gptq(
    bits: int, group: int, less: int, is_symmetric: bool = False, is_ordered: bool = False, seed: int = 2
) -> Callable[[Tensor], Stored]:
    """`less` is what the stored zeros lack: 1 in version 1, 0 in 2."""

    def store(weight: Tensor) -> Stored:
        size = weight.shape[1] if group == -1 else group
        scales = scales_of(weight, size, (1 << bits - 1) - 1, torch.float16)
        zeros = torch.full(scales.shape, 1 << bits - 1) if is_symmetric else draw_zeros(scales.shape, bits)
        groups = torch.arange(weight.shape[1]) // size
        groups = draw_groups(weight.shape[1], size, seed) if is_ordered else groups
        codes, numbers = _rounded(weight, scales, zeros, groups, bits)
        places = list(range(32 // bits))
        return {
            "qweight": _words(codes, bits, places).T,
            "qzeros": _words((zeros - less).T, bits, places),
            "scales": scales.T,
            "g_idx": groups.int(),
        }, numbers

    return store


def awq_config(group: int, **others: Any) -> dict[str, Any]:
    """As AutoAWQ writes it."""
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm"} | others


def store_awq(group: int) -> Callable[[Tensor], Stored]:
    """Columns 0, 2, 4, 6, 1, 3, 5, 7 in the nibbles of a word, from the lowest."""

    def store(weight: Tensor) -> Stored:
        scales = scales_of(weight, group, 7.0, torch.float16)
        zeros = draw_zeros(scales.shape, 4)
        codes, numbers = _rounded(weight, scales, zeros, torch.arange(weight.shape[1]) // group, 4)
        places = [0, 4, 1, 5, 2, 6, 3, 7]
        return {
            "qweight": _words(codes.T, 4, places),
            "qzeros": _words(zeros.T, 4, places),
            "scales": scales.T,
        }, numbers

    return store


def fp8_config(block: tuple[int, int] | None) -> dict[str, Any]:
    """As transformers writes it."""
    found: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    return found if block is None else found | {"weight_block_size": list(block)}


def store_fp8(block: tuple[int, int] | None) -> Callable[[Tensor], Stored]:
    """One scale for a block or a whole weight."""

    def store(weight: Tensor) -> Stored:
        num_outputs, num_inputs = weight.shape
        height, width = block or (num_outputs, num_inputs)
        scales = torch.stack(
            [
                torch.stack([part.abs().amax() / 448 for part in rows.split(width, dim=1)])
                for rows in weight.split(height, dim=0)
            ]
        )
        spread = scales.repeat_interleave(height, 0).repeat_interleave(width, 1)[:num_outputs, :num_inputs]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        stored = {"weight": codes, "weight_scale_inv": scales if block else scales.reshape(())}
        return stored, codes.float() * spread

    return store


def bitsandbytes_config(kind: str, is_nested: bool = False) -> dict[str, Any]:
    """As transformers writes it."""
    if kind == "int8":
        return {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    return {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": is_nested,
        "bnb_4bit_quant_storage": "uint8",
    }


def store_bitsandbytes(kind: str, is_nested: bool = False) -> Callable[[Tensor], Stored]:
    """By the package itself, on this processor."""

    def store(weight: Tensor) -> Stored:
        if kind == "int8":
            largest = weight.abs().amax(1)
            codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
            stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
            return stored, int8_vectorwise_dequant(codes, largest)
        packed, state = quantize_4bit(weight, quant_type=kind, compress_statistics=is_nested, blocksize=64)
        parts = {f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
        largest = dequantize_blockwise(state.absmax, state.state2) + state.offset if is_nested else state.absmax
        # Where blocks go on from one output to the next, the package's kernel for CPUs takes other blocks' scales.
        numbers = _dequantize_4bit_compute(packed.reshape(-1), largest, state.code, 64, weight.shape, torch.float32)
        assert weight.shape[1] % 64 or torch.equal(numbers, dequantize_4bit(packed, state))
        return {"weight": packed} | parts, numbers

    return store
