"""Selects which layers of a loaded model round their rows to int8, and refuses a model that has no kernels for that."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.layers import ExpertWeights, GroupedLinear
from betoken.kernels.build import BuildError
from betoken.kernels.cpu import CPU_DTYPES, load_cpu_kernels
from betoken.kernels.linear_grouped.int8_rows import INT8_KINDS

_LOG = logging.getLogger(__name__)


def select_activations(config: EngineConfig, model: Any) -> None:
    """Set `rounds_rows` of the grouped layers. With `auto` layers and models without a kernel stay exact.

    Raises:
        ModelRefusedError: int8 was set, and the device, the model or a layer has no kernel for it.
    """
    if config.activations == "exact":
        return
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, (GroupedLinear, ExpertWeights))}
    reason = _reason(config, model, layers)
    if reason is None and config.activations == "int8":
        reason = next((f"{name} has {kind} codes" for name, kind in _unsupported(layers)), None)
    if reason is not None and config.activations == "int8":
        raise ModelRefusedError(f"activations: int8: {reason}; kernels exist for {', '.join(INT8_KINDS)} on a CPU")
    if reason is not None:
        _LOG.info("activations are exact: %s", reason)
        return
    for layer in layers.values():
        layer.rounds_rows = layer.grouped.kind in INT8_KINDS


def rounds_rows(model: nn.Module) -> bool:
    """Whether a layer of a model rounds its rows."""
    return any(getattr(module, "rounds_rows", False) for module in model.modules())


@contextmanager
def exact_rows(model: nn.Module) -> Iterator[None]:
    """Let layers that round their rows multiply them exactly meanwhile."""
    layers: list[Any] = [module for module in model.modules() if getattr(module, "rounds_rows", False)]
    for layer in layers:
        layer.rounds_rows = False
    try:
        yield
    finally:
        for layer in layers:
            layer.rounds_rows = True


def _unsupported(layers: dict[str, Any]) -> list[tuple[str, str]]:
    """Layers without a kernel, and their kinds of codes."""
    kinds = ((name, layer.grouped.kind) for name, layer in layers.items())
    return [(name, kind) for name, kind in kinds if kind not in INT8_KINDS]


def _reason(config: EngineConfig, model: Any, layers: dict[str, Any]) -> str | None:
    """Why no layer of the model can round its rows here."""
    if model.device.type != "cpu":
        return f"device {model.device} has no kernel"
    if model.dtype not in CPU_DTYPES:
        return f"dtype {str(model.dtype).removeprefix('torch.')} has no kernel"
    if len(_unsupported(layers)) == len(layers):
        return f"{config.model} has no linear layer with quantised weights of these kinds"
    kernels = load_cpu_kernels(config.cache_dir)
    if kernels is None:
        return "the CPU kernels cannot be built"
    try:
        kernels.load_int8()
    except (BuildError, OSError) as error:
        return f"the kernels cannot be built: {error}"
    return None
