"""Selects how a checkpoint's weights are loaded: from its tensors, or rounded if they are dense.

A method that is not supported is refused by method, field and value.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights import awq, bitsandbytes, compressed_tensors, float8, gptq, modelopt, mxfp4
from betoken.engine.weights.fingerprint import read_headers
from betoken.engine.weights.language_model import language_tensors
from betoken.engine.weights.rounding import plan_rounding
from betoken.engine.weights.stored import Stored, StoredConfig, StoredWeight
from betoken.engine.weights.stored_files import Files, by_layer, plan_of, read_layer
from betoken.engine.weights.tensor_files import StoredTensor

_FORMATS: Mapping[str, ModuleType] = {
    module.METHOD: module for module in (awq, bitsandbytes, compressed_tensors, float8, gptq, modelopt)
}


def select_loading(
    model_config: Any, config: EngineConfig, source: Path, progress: Callable[[float], None] = lambda fraction: None
) -> None:
    """Set a config's `quantization_config` to how its weights are to be loaded; none if they are dense and stay dense.

    Args:
        source: a directory or a GGUF file.
        progress: called with the fraction of quantised weights read so far.

    Raises:
        ModelRefusedError: the method, a field or a tensor is not supported.
    """
    quantization = getattr(model_config, "quantization_config", None) or modelopt.read_settings(source)
    if config.quantize is not None:
        if source.is_file():
            raise ModelRefusedError(f"quantize: {config.quantize}: {source} is a GGUF file, which has its own types")
        if quantization is not None:
            method = quantization.get("quant_method")
            raise ModelRefusedError(f"quantize: {config.quantize}: {config.model} is quantized already, by {method!r}")
        rounding = partial(plan_rounding, config.quantize, language_tensors(read_headers(source)))
        model_config.quantization_config = StoredConfig(rounding, progress)
        return
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        raise ModelRefusedError(f"{config.model}: quantization_config = {quantization!r} is not a table of settings")
    method = _method_of(quantization)
    if method == mxfp4.METHOD:
        model_config.quantization_config = StoredConfig(mxfp4.plan_of(language_tensors(read_headers(source))), progress)
        return
    if not isinstance(method, str) or method not in _FORMATS:
        known = ", ".join(sorted({*_FORMATS, mxfp4.METHOD}))
        raise ModelRefusedError(f"{config.model} is quantized by {method!r}, not by {known}: save it dequantized")
    form: Any = _FORMATS[method]
    with _refusing(method):
        form.check_config(quantization)
    plan = plan_of(method, language_tensors(read_headers(source)), partial(form.stored_weight, quantization))

    def planned(model: Any) -> Mapping[str, Stored]:
        with _refusing(method):
            return plan(model)

    model_config.quantization_config = StoredConfig(planned, progress)


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A weight of numbers, made when it is read. Implements the slice interface of transformers' loader."""

    name: str
    """Name in the checkpoint."""
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    """Reads the numbers, for example of a quantised weight."""
    dtype = "F32"

    @property
    def num_bytes(self) -> int:
        """Bytes of the weight in a half type."""
        return 2 * prod(self.shape)

    def get_dtype(self) -> str:
        """See safetensors."""
        return self.dtype

    def get_shape(self) -> list[int]:
        """See safetensors."""
        return list(self.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self.read()[index]


def dequantised(weights: Sequence[StoredWeight]) -> Tensor:
    """Weights [N, K], one below the other, as numbers."""
    return torch.cat([weight.weight().dequantised() for weight in weights])


def with_dense(
    quantization: Any, files: Files, shape_of: Callable[[str], tuple[int, int] | None]
) -> dict[str, StoredTensor | DenseTensor]:
    """The tensors of a checkpoint with dequantised weights in place of stored codes and scales; others as they are.

    `shape_of`: outputs and inputs of a layer by its path; None if it is not linear.

    Raises:
        ModelRefusedError: the tensors of a weight do not fit its format.
    """
    found: dict[str, StoredTensor | DenseTensor] = dict(files)
    method = _method_of(quantization) if isinstance(quantization, Mapping) else None
    if not isinstance(method, str) or method not in _FORMATS:
        return found
    form: Any = _FORMATS[method]
    with _refusing(method):
        for layer, specs in by_layer(files).items():
            shape = shape_of(layer)
            if shape is None or specs.keys() <= {"weight", "bias"}:
                continue
            weight = read_layer(method, files, partial(form.stored_weight, quantization), layer, shape, specs)
            if weight is not None:
                for name in set(specs) - {"bias"}:
                    del found[f"{layer}.{name}"]
                found[f"{layer}.weight"] = DenseTensor(f"{layer}.weight", shape, partial(dequantised, (weight,)))
    return found


@contextmanager
def _refusing(method: str) -> Iterator[None]:
    """Turn whatever a format's reader raises of settings that are of another kind into a refusal."""
    try:
        yield
    except ModelRefusedError:
        raise
    except Exception as error:  # whatever the settings are taken for
        raise ModelRefusedError(f"{method}: quantization_config: {type(error).__name__}: {error}") from error


def _method_of(quantization: Any) -> Any:
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_8bit") or quantization.get("load_in_4bit")):
        return bitsandbytes.METHOD  # its first versions named none
    return method
