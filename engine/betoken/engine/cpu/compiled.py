"""A CPU forward as one compiled function. Linear layers and attention stay the CPU operators.

Inductor generates the arithmetic between them, on the calling thread alone.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx

from betoken.engine.compiled import TensorCall, compile_traced, constant_of, trace_call
from betoken.engine.cpu.grouped_linear import PackedGroupedLinear
from betoken.engine.cpu.kept_code import KeptCode, join
from betoken.engine.cpu.row_linear import PackedLinear
from betoken.engine.decoder_layers import materialized_results
from betoken.kernels.build import BuildError
from betoken.kernels.cpu import GROUP_COLUMNS, grouped

_OPS: Any = torch.ops.betoken
_Packed = PackedLinear | PackedGroupedLinear
_PACKED = (PackedLinear, PackedGroupedLinear)

COMPILE_OPTIONS = {
    "cpp.threads": 1,
    "size_asserts": False,
    "nan_asserts": False,
    "fallback_random": False,
    "cpp_wrapper": True,  # no interpreter, and none of its lock, between operations
    # Precompiled headers are always in /tmp: each container made 147 MB again, and used none of it.
    "cpp_cache_precompile_headers": False,
}
"""Options of inductor."""


def compile_call(
    call: TensorCall, example: Sequence[Tensor], model: Any, cache_dir: Path, kept: KeptCode | None = None
) -> TensorCall:
    """Trace `call` on `example` (see `trace_call`) and compile it for any number of rows.

    The thread must have begun the example's step. Joined weights replace the separate ones in `model`.

    Args:
        kept: file that takes the code for a later start; None = not kept.

    Raises:
        Exception: whatever the tracer or the compiler raises for a model they cannot take.
    """

    def trace() -> fx.GraphModule:
        with materialized_results(model, _OPS.materialize):
            graph = trace_call(call, example)
        join_linears(graph, model)
        keep_angles(graph)
        return graph

    try:
        keep = None if kept is None else partial(kept.keep, model)
        return compile_traced(trace, example, COMPILE_OPTIONS, cache_dir, keep)
    except Exception as error:
        for path in (str(cache_dir.absolute()), torch.__path__[0]):
            if " " in path:  # unquoted on the compiler's command line, so its complaint names pieces of it
                raise BuildError(f"torch cannot compile where {path!r} holds a space: {error}") from error
        raise


def keep_angles(graph: fx.GraphModule) -> None:
    """Compute the rotary sines and cosines once a forward: inductor would compute them again in every layer."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and node.target in (torch.ops.aten.cos.default, torch.ops.aten.sin.default):
            with graph.graph.inserting_after(node):
                kept = graph.graph.call_function(torch.ops.betoken.materialize.default, (node,))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph.recompile()


def join_linears(graph: fx.GraphModule, model: Any) -> int:
    """Make one product of the linear layers that read the same rows (query, key, value; gate, up); returns how many."""
    owners = {id(module.packed): module for module in model.modules() if isinstance(module, _PACKED)}
    products = [product.default for product in (_OPS.linear, _OPS.linear_grouped, _OPS.linear_int8)]
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target in products:
            readers.setdefault(node.args[0], []).append(node)
    num_joined = 0
    for source, nodes in readers.items():
        packed = [constant_of(graph, node.args[1]) for node in nodes]
        if len(nodes) < 2 or any(tensor is None or id(tensor) not in owners for tensor in packed):
            continue
        modules = [owners[id(tensor)] for tensor in packed]
        if _can_join(modules):
            _join(graph, source, nodes, modules, f"_joined_linear_{num_joined}")
            num_joined += 1
    graph.graph.eliminate_dead_code()
    graph.delete_all_unused_submodules()
    graph.recompile()
    return num_joined


def _can_join(modules: list[_Packed]) -> bool:
    first = modules[0]
    columns = GROUP_COLUMNS if isinstance(first, PackedLinear) else grouped.COLUMNS
    return all(module.num_outputs % columns == 0 for module in modules[:-1]) and all(
        (module.bias is None) == (first.bias is None) and _format_of(module) == _format_of(first) for module in modules
    )


def _format_of(module: _Packed) -> tuple[int, ...]:
    """The operator's arguments besides rows, weight, bias and width."""
    return () if isinstance(module, PackedLinear) else (module.format,)


def _join(graph: fx.GraphModule, source: fx.Node, nodes: list[fx.Node], modules: list[_Packed], name: str) -> None:
    graph.register_buffer(name, join(modules, "packed"))
    has_bias = modules[0].bias is not None
    if has_bias:
        graph.register_buffer(f"{name}_bias", join(modules, "bias"))
    last_dim = source.meta["val"].dim() - 1
    num_outputs = sum(module.num_outputs for module in modules)
    with graph.graph.inserting_before(nodes[0]):
        bias = graph.graph.get_attr(f"{name}_bias") if has_bias else None
        product = graph.graph.call_function(
            cast(Any, nodes[0].target), (source, graph.graph.get_attr(name), bias, num_outputs, *_format_of(modules[0]))
        )
        start = 0
        for node, module in zip(nodes, modules, strict=True):
            end = start + module.num_outputs
            part = graph.graph.call_function(torch.ops.aten.slice.Tensor, (product, last_dim, start, end))
            node.replace_all_uses_with(part)
            start = end
    for node in nodes:
        graph.graph.erase_node(node)
