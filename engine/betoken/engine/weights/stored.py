"""Loading of weights in the bytes of their checkpoint, through transformers' own loader.

Before the loader reads, the linear layers and embeddings of a plan are replaced by modules whose parameters are the
checkpoint's tensors, by name, shape and dtype. After it they become grouped layers. It knows no format: a plan says
which tensors a layer has and how a weight is read from them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from betoken.engine.weights.layers import GroupedEmbedding, GroupedLinear
from betoken.kernels.linear_grouped import Grouped

_METHOD = "betoken"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How a checkpoint stores one weight [N, K]."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype by the name below the layer's."""
    read: Callable[[Mapping[str, Tensor]], Grouped]
    """The weight of the loaded tensors.

    Raises:
        ModelRefusedError: what they hold is no weight.
    """


Plan = Callable[[Any], Mapping[str, StoredWeight]]
"""A transformers model on the meta device -> its layers, by path, that are stored so."""


class StoredConfig(QuantizationConfigMixin):
    """Selects this way of loading, as a model config's `quantization_config`."""

    def __init__(self, plan: Plan) -> None:
        self.quant_method = cast(Any, _METHOD)
        self.plan = plan

    def get(self, name: str, default: Any = None) -> Any:
        """The methods of the dict that transformers takes it for."""
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        """The text that transformers prints of it."""
        return {"quant_method": _METHOD}


class _StoredLayer(nn.Module):
    """Holds a layer's tensors while they are loaded."""

    def __init__(self, stored: StoredWeight, layer: nn.Module) -> None:
        super().__init__()
        self.stored = stored
        self.is_embedding = isinstance(layer, nn.Embedding)
        for name, (shape, dtype) in stored.tensors.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), False))
        if getattr(layer, "bias", None) is not None:
            self.bias = layer.bias

    def take(self) -> dict[str, Tensor]:
        return {name: self._parameters[name].data for name in self.stored.tensors}  # type: ignore[union-attr]


class _StoredQuantizer(HfQuantizer):
    """The hooks of transformers' loader."""

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False

    def get_new_dtype(self, converter: Any, param: Any, dtype: Any) -> Any:
        """None leaves a tensor as stored."""
        is_stored = any(target in self._stored_names for target in converter.target_patterns)
        return None if is_stored else super().get_new_dtype(converter, param, dtype)

    def _process_model_before_weight_loading(self, model: Any, **keywords: Any) -> None:
        self._stored_names: set[str] = set()
        for path, stored in cast(StoredConfig, self.quantization_config).plan(model).items():
            model.set_submodule(path, _StoredLayer(stored, model.get_submodule(path)))
            self._stored_names |= {f"{path}.{name}" for name in stored.tensors}

    def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> Any:
        read: dict[int, Grouped] = {}
        for path, layer in list(model.named_modules()):
            if not isinstance(layer, _StoredLayer):
                continue
            tensors = layer.take()
            key = min(tensor.data_ptr() for tensor in tensors.values())  # tied layers have the same ones
            if any(tensor.is_meta for tensor in tensors.values()):
                continue  # missing; the caller refuses it by name
            weight = read[key] = read[key] if key in read else layer.stored.read(tensors)
            model.set_submodule(path, _grouped_layer(layer, weight, model.dtype))
        del model.config.quantization_config
        return model


def _grouped_layer(layer: _StoredLayer, weight: Grouped, dtype: torch.dtype) -> nn.Module:
    if layer.is_embedding:
        return GroupedEmbedding(weight, dtype)
    return GroupedLinear(weight, getattr(layer, "bias", None))


AUTO_QUANTIZER_MAPPING[_METHOD] = _StoredQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[_METHOD] = StoredConfig
