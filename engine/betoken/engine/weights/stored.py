"""Loads weights in the bytes of their checkpoint, one by one, in addition to transformers' loader.

Before the loader reads, layers and experts that a plan names are taken out of the model; after it, each is read and put
back as a grouped one. So no more than one of them is in memory twice. It knows no format: a plan says which tensors a
weight has and how it is read from them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.layers import ExpertWeights, GroupedEmbedding, GroupedLinear, scale_of
from betoken.engine.weights.memory import give_back
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.weight import below

_METHOD = "betoken"


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """How a checkpoint stores one weight [N, K]."""

    tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    """Shape and dtype by the name below the layer's."""
    read: Callable[[Mapping[str, Tensor]], Grouped]
    """The weight of its tensors, each of which is read when it is asked for.

    Raises:
        ModelRefusedError: their content is not a weight.
    """
    fetch: Callable[[str], Tensor] | None = None
    """Reads a tensor by its name; None if the loader reads a dense weight, named `weight`, that is then rounded."""

    keys: tuple[str, ...] = ()
    """Names of its tensors in the checkpoint, which the loader then need not see."""
    part: Callable[[slice], "StoredWeight"] | None = None
    """Returns the storage of some outputs; None if they can only be read together."""

    def weight(self) -> Grouped:
        """Read it.

        Raises:
            ModelRefusedError: the stored tensors are not a weight.
        """
        return self.read(_Given(self))


class _Given(Mapping[str, Tensor]):
    """The tensors of one weight, read when they are asked for."""

    def __init__(self, stored: StoredWeight) -> None:
        self._stored = stored

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._stored.tensors:
            raise KeyError(name)
        assert self._stored.fetch is not None, "the loader brings the others"
        return self._stored.fetch(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored.tensors)

    def __len__(self) -> int:
        return len(self._stored.tensors)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """How a checkpoint stores the weights of a module of experts."""

    num_experts: int
    weights: tuple[StoredWeight, ...]
    """One below the other they are [E * N, K]."""
    outputs: slice | None = None
    """Outputs of each expert to keep; None = all."""

    @property
    def keys(self) -> tuple[str, ...]:
        """See `StoredWeight`."""
        return tuple(key for weight in self.weights for key in weight.keys)

    def weight(self) -> ExpertWeights:
        """Read them all.

        Raises:
            ModelRefusedError: the stored tensors are not a weight, of two formats, or of two orders in one expert.
        """
        read = [stored.weight() for stored in self.weights]
        orders = self._orders([weight.order for weight in read])
        try:
            grouped = below([replace(weight, order=None) for weight in read])
        except ValueError as error:
            raise ModelRefusedError(f"experts of one module are stored in two ways: {error}") from error
        weight = ExpertWeights(grouped, self.num_experts, orders)
        return weight if self.outputs is None else weight.of_outputs(self.outputs)

    def _orders(self, orders: list[Tensor | None]) -> Tensor | None:
        """Every expert's order of inputs [E, K] int32, None if all have their own."""
        given = next((order for order in orders if order is not None), None)
        if given is None:
            return None
        own = torch.arange(len(given), dtype=torch.int32)
        parts = torch.stack([own if order is None else order for order in orders]).view(self.num_experts, -1, len(own))
        if not bool((parts == parts[:, :1]).all()):
            raise ModelRefusedError("g_idx: the layers of one expert have their inputs in different orders")
        return parts[:, 0].contiguous()


Stored = StoredWeight | StoredExperts
Plan = Callable[[Any], Mapping[str, Stored]]
"""A transformers model on the meta device -> by path its layers, and the weights of its experts, that are stored so."""
Narrow = Callable[[Any, dict[str, Any], Mapping[str, Stored]], dict[str, Stored]]
"""A model on the meta device, the loader's tensors and a plan -> the plan of the parts to load. Changes both others."""


class ModelSplit(Protocol):
    """The part of a model that a process loads."""

    def narrow(self, model: Any, state: dict[str, Any], stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """See `Narrow`."""
        ...

    def apply(self, model: Any) -> None:
        """Replace the layers of a loaded model by layers that compute the part."""
        ...

    def num_elsewhere(self, model: Any) -> int:
        """Return the number of weights in other parts."""
        ...


class StoredConfig(QuantizationConfigMixin):
    """Selects this way of loading, as a model config's `quantization_config`.

    Args:
        progress: called with the fraction of weights read so far.
    """

    def __init__(self, plan: Plan, progress: Callable[[float], None] = lambda fraction: None) -> None:
        self.quant_method = cast(Any, _METHOD)
        self.plan, self.progress = plan, progress

    def get(self, name: str, default: Any = None) -> Any:
        """The methods of the dict that transformers takes it for."""
        return getattr(self, name, default)

    def to_dict(self) -> dict[str, Any]:
        """The text that transformers prints of it."""
        return {"quant_method": _METHOD}


def load_beside(
    model_class: Any, config: Any, state: dict[str, Any], keywords: dict[str, Any], narrow: Narrow | None = None
) -> tuple[Any, dict[str, Any]]:
    """A model whose weights are the values of `state`, except the ones named by a `StoredConfig`; and the report.

    Args:
        state: slices, as safetensors has them, by name; the named ones are removed.
        keywords: arguments of `from_pretrained`.
        narrow: selects parts of the weights; None = whole weights.
    """
    quantization = getattr(config, "quantization_config", None)
    if isinstance(quantization, StoredConfig) or narrow is not None:
        stored = quantization if isinstance(quantization, StoredConfig) else StoredConfig(lambda model: {})
        plan = stored.plan

        def planned(model: Any) -> Mapping[str, Stored]:
            found = plan(model)
            for key in {key for stored in found.values() for key in stored.keys}:
                state.pop(key, None)
            return found if narrow is None else narrow(model, state, found)

        config.quantization_config = StoredConfig(planned, stored.progress)
    loaded: tuple[Any, dict[str, Any]] = model_class.from_pretrained(None, config=config, state_dict=state, **keywords)
    return loaded


def _no_parameter(weight: Tensor) -> Tensor:
    """Placeholder of a parameter, ignored by a model's weight initialisation."""
    found = weight.data
    found._is_hf_initialized = True  # type: ignore[attr-defined]
    return found


class _StoredLayer(nn.Module):
    """Placeholder of a layer while the others are loaded."""

    def __init__(self, layer: nn.Module, scale: float) -> None:
        super().__init__()
        self.is_embedding, self.scale = isinstance(layer, nn.Embedding), scale
        self.weight = _no_parameter(cast(Tensor, layer.weight))
        if getattr(layer, "bias", None) is not None:
            self.bias = layer.bias


class _StoredQuantizer(HfQuantizer):
    """The hooks of transformers' loader."""

    @property
    def is_trainable(self) -> bool:
        return False

    def is_serializable(self) -> bool:
        return False

    def _process_model_before_weight_loading(self, model: Any, **keywords: Any) -> None:
        self._plan = dict(cast(StoredConfig, self.quantization_config).plan(model))
        for path, stored in self._plan.items():
            if isinstance(stored, StoredExperts):
                parent, _, name = path.rpartition(".")
                module = model.get_submodule(parent)
                weight = _no_parameter(getattr(module, name))
                delattr(module, name)
                setattr(module, name, weight)
            elif stored.fetch is not None:
                layer = model.get_submodule(path)
                if (scale := scale_of(layer, model.dtype)) is None:
                    raise ModelRefusedError(f"{path} is quantized, and {type(layer).__name__} has custom code")
                model.set_submodule(path, _StoredLayer(layer, scale))
                model.all_tied_weights_keys.pop(f"{path}.weight", None)  # the plan names both ends

    def _process_model_after_weight_loading(self, model: Any, **keywords: Any) -> Any:
        report = cast(StoredConfig, self.quantization_config).progress
        read: dict[int, Grouped] = {}
        for number, (path, stored) in enumerate(self._plan.items()):
            report(number / len(self._plan))
            give_back()
            if isinstance(stored, StoredExperts):
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, stored.weight())
                continue
            layer = model.get_submodule(path)
            if stored.fetch is None:
                if layer.weight.is_meta:
                    continue  # missing, which whoever loads refuses by name
                weight = stored.read({"weight": layer.weight.data})
            else:
                weight = read[id(stored)] = read[id(stored)] if id(stored) in read else stored.weight()
            model.set_submodule(path, _grouped_layer(layer, weight, model.dtype))
        del model.config.quantization_config
        return model


def _grouped_layer(layer: Any, weight: Grouped, dtype: torch.dtype) -> nn.Module:
    if getattr(layer, "is_embedding", False):
        return GroupedEmbedding(weight, dtype, layer.scale)
    return GroupedLinear(weight, getattr(layer, "bias", None))


AUTO_QUANTIZER_MAPPING[_METHOD] = _StoredQuantizer
AUTO_QUANTIZATION_CONFIG_MAPPING[_METHOD] = StoredConfig
