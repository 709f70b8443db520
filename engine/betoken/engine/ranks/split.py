"""Leaves a rank its columns of a model's linear layers, experts and embedding, and its heads of attention.

Kernels replace the layers afterwards, as they do in a whole model.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from betoken.engine.kv_pool import LayerShape
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.chains import Chain, find_chains
from betoken.engine.ranks.columns import Columns, columns_of, units_of
from betoken.engine.ranks.layers import RankEmbedding, RankLinear, gather_columns
from betoken.engine.weights.experts import bias_of, find_experts, up_name
from betoken.engine.weights.layers import ExpertWeights, GroupedEmbedding, GroupedLinear, linear_paths
from betoken.engine.weights.memory import give_back
from betoken.kernels.linear_grouped import Grouped

_Take = Callable[[Grouped, slice], Grouped]


def split_layers(model: Any, shapes: Mapping[int, LayerShape], group: RankGroup) -> dict[int, LayerShape]:
    """Replace a loaded model's layers by the rank's columns of them, freeing each in turn.

    Layers with too few columns for all ranks stay whole. Returns the shapes of keys and values that the rank stores.
    """
    take, shapes, paths = _OwnRows(), dict(shapes), linear_paths(model)
    whole = set(paths)
    for chain in find_chains(model, shapes):
        if whole.issuperset((*chain.firsts, chain.last)) and _split_chain(model, chain, shapes, group, take):
            whole.difference_update((*chain.firsts, chain.last))
    for path in paths:
        if path in whole and (columns := columns_of(group, _sizes(model.get_submodule(path))[0])):
            _replace(model, path, group, columns, take)
    for module in find_experts(model):
        for name in (up_name(module), "down_proj"):
            _split_experts(module, name, group)
        give_back()
    _split_embedding(model, group, take)
    give_back()
    return shapes


def _split_chain(model: Any, chain: Chain, shapes: dict[int, LayerShape], group: RankGroup, take: _Take) -> bool:
    """Split the layers of a chain, with the heads of an attention layer; return whether that is possible."""
    outputs = [_sizes(model.get_submodule(path))[0] for path in chain.firsts]
    num_outputs, num_inputs = _sizes(model.get_submodule(chain.last))
    last = columns_of(group, num_outputs)
    if chain.layer is None:
        inputs = columns_of(group, num_inputs)
        firsts = [inputs] * len(outputs) if outputs == [num_inputs] * len(outputs) else []
    else:
        shape = shapes[chain.layer]
        num_heads = shape.num_heads
        sizes_fit = outputs[1:] == [num_heads * shape.key_size, num_heads * shape.value_size]
        if not sizes_fit or outputs[0] % num_heads or num_inputs % num_heads:
            return False
        firsts = [units_of(group, total, total // num_heads) for total in outputs]
        inputs = units_of(group, num_inputs, num_inputs // num_heads)
    if last is None or inputs is None or not firsts:
        return False
    for path, columns in zip(chain.firsts, firsts, strict=True):
        assert columns is not None, "all have the units of `inputs`"
        _replace(model, path, group, columns, take, gathers_output=False)
    _replace(model, chain.last, group, last, take, inputs=inputs)
    if chain.layer is not None and (keys := firsts[1]) is not None:
        shapes[chain.layer] = replace(shape, num_heads=(keys.stop - keys.start) // shape.key_size)
    return True


def _replace(model: Any, path: str, group: RankGroup, columns: Columns, take: _Take, **options: Any) -> None:
    own = _own_linear(model.get_submodule(path), columns, take)
    model.set_submodule(path, RankLinear(own, group, columns, **options))
    give_back()


def _sizes(layer: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    if isinstance(layer, GroupedLinear):
        return layer.grouped.shape
    num_outputs, num_inputs = reversed(layer.weight.shape) if isinstance(layer, Conv1D) else layer.weight.shape
    return num_outputs, num_inputs


class _OwnRows:
    """Copies rows of grouped weights; tied layers share the copy, as they share the weight."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int, int], Grouped] = {}

    def __call__(self, weight: Grouped, rows: slice) -> Grouped:
        key = (weight.values.data_ptr(), rows.start, rows.stop)
        if key not in self._made:
            own = weight.rows(rows)
            copies = {name: tensor.clone() for name, tensor in own.tensors().items() if name != "order"}
            self._made[key] = replace(own, **cast(Any, copies))
        return self._made[key]


def _own_linear(layer: Any, columns: Columns, take: _Take) -> nn.Module:
    bias = None if layer.bias is None else layer.bias[columns.range].clone()
    if isinstance(layer, GroupedLinear):
        own = GroupedLinear(take(layer.grouped, columns.range), bias)
        own.rounds_rows = layer.rounds_rows
        return own
    weight = layer.weight[:, columns.range].T if isinstance(layer, Conv1D) else layer.weight[columns.range]
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = _parameter(weight.clone(memory_format=torch.contiguous_format))
    if bias is not None:
        linear.bias = _parameter(bias)
    return linear.eval()


def _split_experts(module: Any, name: str, group: RankGroup) -> None:
    """Leave a module of experts the rank's columns of each expert's weight."""
    weight, bias = getattr(module, name), bias_of(module, name)
    is_grouped = isinstance(weight, ExpertWeights)
    axis = 2 if not is_grouped and module.is_transposed else 1
    columns = columns_of(group, weight.num_outputs if is_grouped else weight.shape[axis])
    if columns is None:
        return
    if is_grouped:
        firsts = torch.arange(weight.num_experts, device=weight.grouped.values.device)[:, None] * columns.total
        rows = (firsts + torch.arange(columns.start, columns.stop, device=firsts.device)).flatten()
        own: Any = ExpertWeights(weight.grouped.rows(rows), weight.num_experts, weight.orders)
        own.rounds_rows = weight.rounds_rows
    else:
        own = _parameter(weight.narrow(axis, columns.start, columns.stop - columns.start).clone())
    setattr(module, name, own)
    if bias is not None:
        setattr(module, f"{name}_bias", _parameter(bias[:, columns.range].clone()))
    setattr(module, f"gather_{name}", partial(gather_columns, group=group, columns=columns))


def _split_embedding(model: Any, group: RankGroup, take: _Take) -> None:
    """Leave the input embedding the rank's rows, the columns of an output layer that shares its weight."""
    layer = model.get_input_embeddings()
    path = next((path for path, module in model.named_modules() if module is layer), None)
    is_dense = type(layer) is nn.Embedding
    if path is None or not (is_dense or isinstance(layer, GroupedEmbedding)):
        return
    ids = columns_of(group, layer.weight.shape[0] if is_dense else layer.grouped.shape[0])
    if ids is None:
        return
    own: nn.Module
    if is_dense:
        own = nn.Embedding(ids.stop - ids.start, layer.weight.shape[1], device="meta")
        own.weight = _parameter(layer.weight[ids.range].clone())
    else:
        own = GroupedEmbedding(take(layer.grouped, ids.range), layer.dtype, layer.scale)
    model.set_submodule(path, RankEmbedding(own, group, ids))


def _parameter(weight: Tensor) -> nn.Parameter:
    return nn.Parameter(weight, requires_grad=False)
