"""The inputs of products of a traced forward, where several of them become one. It knows no layers."""

from typing import Any

import torch
from torch import fx

_ATEN: Any = torch.ops.aten


def rows_read(linear: fx.Node) -> fx.Node:
    """The inputs of a product before they are flattened; each product flattens its own."""
    rows: Any = linear.args[0]
    while rows.target in (_ATEN.view.default, _ATEN._unsafe_view.default):
        rows = rows.args[0]
    return rows  # type: ignore[no-any-return]


def let_go(graph: fx.GraphModule, weights: list[Any]) -> None:
    """Forget weights that were joined, before the next ones are: a device need not hold all of them twice."""
    for node in weights:
        if not node.users:
            graph.graph.erase_node(node)
    names = {node.target for node in graph.graph.nodes if node.op == "get_attr"}
    for name in {node.target for node in weights} - names:
        delattr(graph, name)
