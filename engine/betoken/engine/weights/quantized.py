"""Which way a checkpoint's weights are loaded: by its tensors, undone by transformers, or rounded where they are dense.

A method that neither supports is refused by method, field and value.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights import awq, compressed_tensors, float8, gptq
from betoken.engine.weights.rounding import plan_rounding
from betoken.engine.weights.stored import StoredConfig
from betoken.engine.weights.stored_files import Spec, plan_of, read_specs

_FORMATS: Mapping[str, ModuleType] = {module.METHOD: module for module in (awq, compressed_tensors, float8, gptq)}
_UNDONE = ("mxfp4", "fp8")
"""What transformers undoes as it loads: `fp8` for experts, and on devices without a kernel of ours."""


def select_loading(model_config: Any, config: EngineConfig, directory: Path) -> None:
    """Set a config's `quantization_config` to how its weights are to be loaded; none where they are dense and stay so.

    Raises:
        ModelRefusedError: the method, a field or a tensor is not supported.
    """
    quantization = getattr(model_config, "quantization_config", None)
    if config.quantize is not None:
        if directory.is_file():
            raise ModelRefusedError(f"quantize: {config.quantize}: {directory} is a GGUF file, of types of its own")
        if quantization is not None:
            method = quantization.get("quant_method")
            raise ModelRefusedError(f"quantize: {config.quantize}: {config.model} is quantized already, by {method!r}")
        model_config.quantization_config = StoredConfig(partial(plan_rounding, config.quantize))
        return
    if quantization is None:
        return
    method = quantization.get("quant_method")
    if method not in _FORMATS and method not in _UNDONE:
        known = ", ".join(sorted({*_FORMATS, *_UNDONE}))
        raise ModelRefusedError(f"{config.model} is quantized by {method!r}, not by {known}: save it dequantized")
    if method in _FORMATS:
        form: Any = _FORMATS[method]
        form.check_config(quantization)
        specs = read_specs(directory)
        expert = _quantized_expert(specs)
        if expert is None and (method not in _UNDONE or config.device == "cpu"):
            plan = plan_of(method, specs, partial(form.stored_weight, quantization))
            model_config.quantization_config = StoredConfig(plan)
            return
        if method not in _UNDONE:
            raise ModelRefusedError(f"{method}: {expert}: experts of mixtures are not supported")
    stored = str(model_config.dtype).removeprefix("torch.")
    if method == "fp8" and config.dtype not in ("auto", stored):  # what is not quantized stays as it is stored
        raise ModelRefusedError(
            f"dtype: {config.model}, quantized by 'fp8' and undone at load, can be served in {stored} only"
        )
    # Otherwise the device and the installed packages decide whether kernels multiply the stored numbers. Their rows
    # depend on each other, since they share experts or are quantized together.
    quantization["dequantize"] = True


def _quantized_expert(specs: Mapping[str, Mapping[str, Spec]]) -> str | None:
    for path, tensors in specs.items():
        is_quantized = any(name != "weight" and name != "bias" for name in tensors)
        if ".experts" in path and is_quantized:
            return path
    return None
