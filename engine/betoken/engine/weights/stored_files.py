"""The tensors of a layer's quantised weight in safetensors files, read from their headers.

It knows names, shapes and dtypes, and how codes of 4 and 8 bits lie in words; it knows no format.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.fingerprint import weight_files
from betoken.engine.weights.stored import Plan, StoredWeight
from betoken.kernels.linear_grouped import Grouped

_DTYPES = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

Spec = tuple[tuple[int, ...], str]
"""Shape, and dtype as safetensors names it."""


@dataclass(slots=True)
class StoredTensors:
    """The tensors of one layer [N, K] in a checkpoint."""

    method: str
    """The quantisation's name in config.json."""
    path: str
    num_outputs: int
    num_inputs: int
    specs: Mapping[str, Spec]
    """By the name below the layer's."""

    def refuse(self, name: str, what: str) -> ModelRefusedError:
        """The error for one of its tensors."""
        return ModelRefusedError(f"{self.method}: {self.path}.{name}: {what}")

    def take(self, name: str, shapes: list[tuple[int, ...]], *dtypes: torch.dtype) -> tuple[tuple[int, ...], Any]:
        """A tensor's shape and dtype.

        Raises:
            ModelRefusedError: it is not there, or has none of these.
        """
        if name not in self.specs:
            raise self.refuse(name, "is not in the checkpoint")
        shape, dtype_name = self.specs[name]
        if shape not in shapes or _DTYPES.get(dtype_name) not in dtypes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            types = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refuse(name, f"{list(shape)} of {dtype_name}, not {expected} of {types}")
        return shape, _DTYPES[dtype_name]

    def grouped(self, **given: Any) -> Grouped:
        """The weight.

        Raises:
            ModelRefusedError: scales that are not finite, or a weight that no kernel takes.
        """
        if not bool(given["scales"].isfinite().all()):
            raise self.refuse("scales", "not all are finite")
        try:
            return Grouped(num_inputs=self.num_inputs, **given)
        except ValueError as error:
            raise self.refuse("weight", str(error)) from error


def read_specs(directory: Path) -> dict[str, dict[str, Spec]]:
    """Every tensor's shape and dtype: by layer, by name below it."""
    found: dict[str, dict[str, Spec]] = {}
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - no mapping
                layer, _, name = key.rpartition(".")
                part = file.get_slice(key)
                found.setdefault(layer, {})[name] = (tuple(part.get_shape()), part.get_dtype())
    return found


def plan_of(
    method: str, specs: Mapping[str, Mapping[str, Spec]], stored: Callable[[StoredTensors], StoredWeight | None]
) -> Plan:
    """Layers for whose tensors `stored` has a reading; layers with the reading None stay dense."""

    def plan(model: Any) -> dict[str, StoredWeight]:
        found = {}
        for path, layer in model.named_modules():
            if path not in specs or not isinstance(layer, (nn.Linear, nn.Embedding, Conv1D)):
                continue
            shape = tuple(layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape)
            weight = stored(StoredTensors(method, path, shape[0], shape[1], specs[path]))
            if weight is not None:
                found[path] = weight
        for target in getattr(model, "_tied_weights_keys", None) or {}:
            if model.config.tie_word_embeddings and target.removesuffix(".weight") in found:
                raise ModelRefusedError(
                    f"{method}: {target} is quantized, though tie_word_embeddings says that it is another's weight"
                )
        return found

    return plan


def check_group(method: str, field: str, group: Any, num_inputs: int) -> int:
    """Inputs that share a scale; -1 or None means all.

    Raises:
        ModelRefusedError: the kernels lack such groups.
    """
    if group in (-1, None):
        return -(-num_inputs // 32) * 32
    if not isinstance(group, int) or isinstance(group, bool) or group < 16 or (group != 16 and group % 32):
        raise ModelRefusedError(f"{method}: {field} = {group!r} is neither -1, 16 nor a multiple of 32")
    return group


def integer_weight(
    tensors: StoredTensors, bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, group: int
) -> Grouped:
    """w = scale * (code - zero).

    Args:
        codes: uint8 [N, bytes of K inputs at least], the first of two codes of 4 bits in the low half.
        scales: [N, G] float.
        zeros: int32 [N, G]; None stands for half of the codes' range.
    """
    half = 1 << bits - 1
    if zeros is not None and bool((zeros == half).all()):
        zeros = None
    if bits == 4:
        values = codes[:, : -(-tensors.num_inputs // 2)].contiguous()
        given = {"zero": 8} if zeros is None else {"zeros": zeros.to(torch.uint8).contiguous()}
        return tensors.grouped(kind="int4", group=group, values=values, scales=scales.contiguous(), **given)
    values = (codes[:, : tensors.num_inputs] ^ 128).contiguous().view(torch.int8)
    if zeros is not None and bool((zeros > 255).any()):
        raise tensors.refuse("zeros", "one is above 255")
    less = None if zeros is None else (zeros - half).to(torch.int8).contiguous()
    return tensors.grouped(kind="int8", group=group, values=values, scales=scales.contiguous(), zeros=less)


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """int32 [R, C], lowest bits first -> int32 [R, width]."""
    codes = packed.contiguous().view(torch.uint8)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(1)
    return codes[:, :width].int()


def pack_pairs(codes: Tensor) -> Tensor:
    """uint8 [N, K], each below 16 -> uint8 [N, ceil(K / 2)], the first of two in the low half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | codes[:, 1::2] << 4
