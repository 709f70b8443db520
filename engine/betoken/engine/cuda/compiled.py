"""A GPU forward as one compiled function: traced with a symbolic number of rows, fused by inductor.

Products, sums and attention stay opaque operators, so inductor adds up nothing. Its choices may then differ between
processes without changing a bit.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from betoken.engine.compiled import compile_traced, constant_of, trace_call
from betoken.engine.cuda import operators  # noqa: F401 - defines what the graph calls
from betoken.engine.cuda.joined_grouped import join_grouped
from betoken.engine.cuda.joins import let_go, rows_read
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.decoder_layers import materialized_results
from betoken.engine.forward import ModelCall

_ATEN: Any = torch.ops.aten
_ROWS: Any = torch.ops.betoken_rows
_DENSE_ROWS = {
    _ROWS.linear.default,
    _ROWS.linear_sums.default,
    _ROWS.expert_linear.default,
    _ROWS.linear_grouped.default,
    _ROWS.linear_grouped_sums.default,
    _ROWS.expert_linear_grouped.default,
    _ROWS.row_sum.default,
}
_OPTIONS = {"size_asserts": False, "nan_asserts": False, "fallback_random": False}


def compile_call(call: ModelCall, example: Sequence[Tensor], model: nn.Module, cache_dir: Path) -> ModelCall:
    """Trace and compile for any number of rows. Joined weights replace the separate ones in `model`.

    Raises:
        Exception: whatever the tracer or the compiler raises for a model they cannot take.
    """

    def trace() -> fx.GraphModule:
        with materialized_results(model, _ROWS.materialize):
            graph = trace_call(call, example)
        join_linears(graph, model)
        return graph

    from torch._inductor.async_compile import shutdown_compile_workers  # at import it looks for compilers

    try:
        return compile_traced(trace, example, _OPTIONS, cache_dir)
    finally:
        shutdown_compile_workers()  # processes that compile Triton's kernels, one for each core, would stay with ours


def join_linears(graph: fx.GraphModule, model: nn.Module) -> int:
    """Make one product of the linear layers that read the same rows (query, key, value; gate, up); returns how many.

    A product's order of summation follows from its shape, so the joined one may have other bits than the separate ones.
    """
    owners = {id(module.weight): module for module in model.modules() if isinstance(module, RowLinear)}
    readers: dict[fx.Node, list[tuple[fx.Node, RowLinear]]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is _ROWS.linear.default:
            owner = owners.get(id(constant_of(graph, node.args[1])))
            if owner is not None:
                readers.setdefault(rows_read(node), []).append((node, owner))
    num_uses = Counter(layer for group in readers.values() for _, layer in group)
    groups = [group for group in readers.values() if _can_join([layer for _, layer in group], num_uses)]
    for index, group in enumerate(groups):
        _join(graph, group, f"_joined_linear_{index}")
    num_joined = len(groups) + join_grouped(graph, model)
    if num_joined:
        _allow_parts(graph)
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return num_joined


def _can_join(layers: list[RowLinear], num_uses: Counter[RowLinear]) -> bool:
    """Alike, and each used once: a layer that several depths share would be there once for each."""
    kinds = {(layer.weight.shape[1], layer.bias is None) for layer in layers}
    return len(layers) > 1 and len(kinds) == 1 and all(num_uses[layer] == 1 for layer in layers)


def _join(graph: fx.GraphModule, group: list[tuple[fx.Node, RowLinear]], name: str) -> None:
    layers = [layer for _, layer in group]
    graph.register_buffer(name, torch.cat([layer.weight for layer in layers]))
    joined = graph.get_buffer(name)
    bounds = [0]
    for layer in layers:  # products that read them separately read the same memory
        bounds.append(bounds[-1] + len(layer.weight))
        layer.weight = nn.Parameter(joined[bounds[-2] : bounds[-1]], requires_grad=False)
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    if biases:
        graph.register_buffer(f"{name}_bias", torch.cat(biases))
    first = group[0][0]
    with graph.graph.inserting_before(first):
        weight = graph.graph.get_attr(name)
        bias = graph.graph.get_attr(f"{name}_bias") if biases else None
        arguments = (first.args[0], weight, bias, sum(layer.whole_outputs for layer in layers))
        product = graph.graph.call_function(_ROWS.linear.default, arguments)
        for (node, _), start, end in zip(group, bounds, bounds[1:], strict=False):
            part = graph.graph.call_function(_ATEN.slice.Tensor, (product, 1, start, end))
            node.replace_all_uses_with(part)
    separate = [node.args[1] for node, _ in group]
    for node, _ in group:
        graph.graph.erase_node(node)
    let_go(graph, separate)


def _allow_parts(graph: fx.GraphModule) -> None:
    """Rows of a separate product are now a part of longer ones, which not every consumer supports."""
    for node in list(graph.graph.nodes):
        if node.target is _ATEN.view.default:
            node.target = _ATEN.reshape.default
        elif node.target in _DENSE_ROWS:
            with graph.graph.inserting_before(node):
                node.update_arg(0, graph.graph.call_function(_ATEN.contiguous.default, (node.args[0],)))
