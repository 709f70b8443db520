"""One product of the grouped layers that read the same rows, in a traced forward. It knows no formats."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor, fx

from betoken.engine.compiled import constant_of
from betoken.engine.cuda.grouped_operators import fields_of
from betoken.engine.cuda.joins import let_go, rows_read
from betoken.engine.cuda.row_linear import RowGroupedLinear
from betoken.kernels.linear_grouped import Grouped
from betoken.kernels.linear_grouped.weight import below

_ATEN: Any = torch.ops.aten
_ROWS: Any = torch.ops.betoken_rows
_VALUES = 3
"""Place of a weight's codes among the operator's arguments."""

Reader = tuple[fx.Node, RowGroupedLinear]


def join_grouped(graph: fx.GraphModule, model: torch.nn.Module) -> int:
    """Join query, key, value and gate, up if they have one format; return the number of products.

    A product's order of summation follows from its shape, so the joined one may have other bits than the separate ones.
    """
    owners = {id(module.grouped.values): module for module in model.modules() if isinstance(module, RowGroupedLinear)}
    readers: dict[fx.Node, list[Reader]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is _ROWS.linear_grouped.default:
            owner = owners.get(id(constant_of(graph, node.args[_VALUES])))
            if owner is not None:
                readers.setdefault(rows_read(node), []).append((node, owner))
    num_uses = Counter(layer for group in readers.values() for _, layer in group)
    num_joined = 0
    for group in readers.values():
        layers = [layer for _, layer in group]
        if len({layer.bias is None for layer in layers}) == 1 and all(num_uses[layer] == 1 for layer in layers):
            weight = _joined([layer.grouped for layer in layers])
            if weight is not None:
                _join(graph, group, weight, f"_joined_grouped_{num_joined}")
                num_joined += 1
    return num_joined


def _joined(weights: list[Grouped]) -> Grouped | None:
    if len(weights) < 2 or any(weight.order is not None for weight in weights):
        return None
    try:
        return below(weights)
    except ValueError:  # they are of several formats
        return None


def _join(graph: fx.GraphModule, group: list[Reader], weight: Grouped, name: str) -> None:
    named = {f"{name}_{field}": tensor for field, tensor in weight.tensors().items()}
    layers = [layer for _, layer in group]
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        named[f"{name}_bias"] = torch.cat(biases)
    for key, tensor in named.items():
        graph.register_buffer(key, tensor)
    places = {id(tensor): key for key, tensor in named.items()}
    bounds = [0]
    for layer in layers:  # whoever reads them separately reads the same memory
        bounds.append(bounds[-1] + layer.grouped.shape[0])
        layer.grouped = weight.rows(slice(bounds[-2], bounds[-1]))
    first = group[0][0]
    with graph.graph.inserting_before(first):
        attributes = {key: graph.graph.get_attr(key) for key in named}
        fields = [attributes[places[id(field)]] if isinstance(field, Tensor) else field for field in fields_of(weight)]
        whole_outputs = sum(layer.whole_outputs for layer in layers)
        arguments = (first.args[0], attributes.get(f"{name}_bias"), whole_outputs, *fields)
        product = graph.graph.call_function(_ROWS.linear_grouped.default, arguments)
        for (node, _), start, end in zip(group, bounds, bounds[1:], strict=False):
            part = graph.graph.call_function(_ATEN.slice.Tensor, (product, 1, start, end))
            node.replace_all_uses_with(part)
    separate = [part for node, _ in group for part in node.all_input_nodes if part.op == "get_attr"]
    for node, _ in group:
        graph.graph.erase_node(node)
    let_go(graph, separate)
