"""Leaves a rank its columns of a model's linear layers, experts and embedding, and its heads of attention.

The columns are chosen before weights are read, so that only they are. Kernels replace the layers afterwards, as they do
in a whole model.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.chains import Chain, find_chains
from betoken.engine.ranks.columns import Columns, columns_of, units_of
from betoken.engine.ranks.layers import RankEmbedding, RankLinear, gather_columns, num_on_other_ranks
from betoken.engine.ranks.narrowing import narrow_stored, narrow_tensors
from betoken.engine.weights.experts import bias_of, find_experts, up_name
from betoken.engine.weights.layers import ExpertWeights, GroupedEmbedding, GroupedLinear, linear_paths, scale_of
from betoken.engine.weights.memory import give_back
from betoken.engine.weights.stored import Stored


class _Share(NamedTuple):
    """A rank's part of a linear layer: arguments of `RankLinear`."""

    columns: Columns
    inputs: Columns | None = None
    gathers_output: bool = True


class Split:
    """The columns of one rank. Layers with too few columns for all ranks stay whole."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._linears: dict[str, _Share] = {}
        self._experts: dict[str, Columns] = {}
        """By path of the weight."""
        self._embedding: dict[str, Columns] = {}

    def narrow(self, model: Any, state: dict[str, Any], stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """Choose the columns of a model on the meta device, so that loading reads only them (`stored.Narrow`)."""
        self._choose(model, find_chains(model))
        columns = {path: share.columns for path, share in self._linears.items()} | self._experts | self._embedding
        narrow_tensors(model, state, columns)
        return narrow_stored(stored, columns)

    def apply(self, model: Any) -> None:
        """Replace the layers of a loaded model; layers that were loaded whole are cut, each in turn."""
        for path, share in self._linears.items():
            own = _own_linear(model.get_submodule(path), share.columns)
            model.set_submodule(path, RankLinear(own, self._group, *share))
            give_back()
        for path, columns in self._experts.items():
            _split_experts(model, path, columns, self._group)
            give_back()
        for path, ids in self._embedding.items():
            _split_embedding(model, path, ids, self._group)
        give_back()

    def num_elsewhere(self, model: Any) -> int:
        """Return the number of weights of a loaded model that other ranks have, each counted once."""
        return num_on_other_ranks(model)

    def apply_to_rest(self, model: Any) -> None:
        """Split layers added to a model since `apply`, for example by mixers."""
        self._linears, self._experts, self._embedding = {}, {}, {}
        self._choose(model, [])
        self.apply(model)

    def _choose(self, model: Any, chains: list[Chain]) -> None:
        done = tuple(f"{path}." for path, module in model.named_modules() if isinstance(module, RankLinear))
        paths = [path for path in linear_paths(model) if not path.startswith(done)]
        for chain in chains:
            if {*chain.firsts, chain.last} <= set(paths):
                self._linears |= _shares_of(model, chain, self._group)
        for path in paths:
            if path not in self._linears and (own := columns_of(self._group, _sizes(model.get_submodule(path))[0])):
                self._linears[path] = _Share(own)
        experts = {id(module) for module in find_experts(model)}
        for path, module in model.named_modules():
            for name in (up_name(module), "down_proj") if id(module) in experts else ():
                if not hasattr(module, f"gather_{name}") and (own := columns_of(self._group, _width(module, name))):
                    self._experts[f"{path}.{name}"] = own
        layer = model.get_input_embeddings()
        table = next((path for path, module in model.named_modules() if module is layer), None)
        if table is not None and isinstance(layer, nn.Embedding) and scale_of(layer, model.dtype) is not None:
            ids = columns_of(self._group, layer.weight.shape[0])
            self._embedding = {} if ids is None else {table: ids}


def _shares_of(model: Any, chain: Chain, group: RankGroup) -> dict[str, _Share]:
    """The shares of a chain's layers, with the heads of an attention layer; none if the chain cannot be split."""
    outputs = [_sizes(model.get_submodule(path))[0] for path in chain.firsts]
    num_outputs, num_inputs = _sizes(model.get_submodule(chain.last))
    last = columns_of(group, num_outputs)
    if chain.key_size is None:
        inputs = columns_of(group, num_inputs)
        firsts = [inputs] * len(outputs) if outputs == [num_inputs] * len(outputs) else []
    else:
        num_heads, rest = divmod(outputs[1], chain.key_size)
        if rest or not num_heads or outputs[2] != outputs[1] or outputs[0] % num_heads or num_inputs % num_heads:
            return {}
        firsts = [units_of(group, total, total // num_heads) for total in outputs]
        inputs = units_of(group, num_inputs, num_inputs // num_heads)
    if last is None or inputs is None or not firsts:
        return {}
    found = {chain.last: _Share(last, inputs)}
    for path, columns in zip(chain.firsts, firsts, strict=True):
        assert columns is not None, "all have the units of `inputs`"
        found[path] = _Share(columns, gathers_output=False)
    return found


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if isinstance(layer, GroupedLinear):
        return layer.grouped.shape
    num_outputs, num_inputs = reversed(layer.weight.shape) if isinstance(layer, Conv1D) else layer.weight.shape
    return num_outputs, num_inputs


def _width(module: Any, name: str) -> int:
    """Outputs of the experts of a module."""
    weight = getattr(module, name)
    if isinstance(weight, ExpertWeights):
        return weight.num_outputs
    width: int = weight.shape[2 if module.is_transposed else 1]
    return width


def _own_linear(layer: Any, columns: Columns) -> nn.Module:
    bias = None if layer.bias is None else _parameter(layer.bias[columns.range].clone())
    if isinstance(layer, GroupedLinear):
        layer.bias = bias
        return layer
    weight = layer.weight.T if isinstance(layer, Conv1D) else layer.weight
    is_whole = weight.shape[0] == columns.total and columns.width < columns.total
    if is_whole:
        weight = weight[columns.range]
    if is_whole or isinstance(layer, Conv1D):
        weight = _parameter(weight.clone(memory_format=torch.contiguous_format))
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = weight  # which tied layers share
    if bias is not None:
        linear.bias = bias
    return linear.eval()


def _split_experts(model: Any, path: str, columns: Columns, group: RankGroup) -> None:
    """Leave a module of experts the rank's columns of each expert's weight."""
    parent, _, name = path.rpartition(".")
    module = model.get_submodule(parent)
    if _width(module, name) == columns.total:
        weight, axis = getattr(module, name), 2 if module.is_transposed else 1
        if isinstance(weight, ExpertWeights):
            setattr(module, name, weight.of_outputs(columns.range))
        else:
            setattr(module, name, _parameter(weight.narrow(axis, columns.start, columns.size).clone()))
    if (bias := bias_of(module, name)) is not None:
        setattr(module, f"{name}_bias", _parameter(bias[:, columns.range].clone()))
    setattr(module, f"gather_{name}", partial(gather_columns, group=group, columns=columns))


def _split_embedding(model: Any, path: str, ids: Columns, group: RankGroup) -> None:
    """Leave the input embedding the rank's rows, the columns of an output layer that shares its weight."""
    layer = model.get_submodule(path)
    if not isinstance(layer, GroupedEmbedding):
        layer.padding_idx = None  # trains nothing, and may be another rank's
        if layer.weight.shape[0] == ids.total:
            layer.weight = _parameter(layer.weight[ids.range].clone())
    model.set_submodule(path, RankEmbedding(layer, group, ids))


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
