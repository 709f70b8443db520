"""A model's forward as one compiled function: traced once with a symbolic number of rows, fused by inductor.

Linear layers and attention stay the CPU operators; what inductor generates is the arithmetic between them. It is
not told the number of threads: those few operations run on the calling thread.
"""

import gc
import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from betoken.engine.cpu.row_linear import PackedLinear
from betoken.engine.forward import ModelCall
from betoken.kernels.build import BuildError, native_target, private_folder
from betoken.kernels.cpu import GROUP_COLUMNS, LIBRARY

_LOG = logging.getLogger(__name__)

EXAMPLE_ROWS = 8
EXAMPLE_LOGITS = 6
"""Rows of the batch a compiled forward is traced on, and how many of them yield logits: another number, or the tracer
takes the two for one."""

_OPTIONS = {
    "cpp.threads": 1,
    "size_asserts": False,
    "nan_asserts": False,
    "fallback_random": False,
    "cpp_wrapper": True,  # no interpreter, and none of its lock, between operations
    # Headers compiled beforehand lie in /tmp, whatever the cache: each container made 147 MB anew, and used none of it.
    "cpp_cache_precompile_headers": False,
}


class _SharingGraph(fx.GraphModule):
    """A graph with the weights that it reads, and no others; copies, such as inductor makes, have the same ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        memo.update((id(tensor), tensor) for tensor in (*self.buffers(), *self.parameters()))
        copy: fx.GraphModule = super().__deepcopy__(memo)
        return copy


def compile_call(call: ModelCall, example: tuple[Tensor, Tensor, Tensor], model: Any, cache_dir: Path) -> ModelCall:
    """Trace `call` on `example` (see `trace_call`) and compile it for any number of rows.

    The thread must have begun the example's step. Joined weights replace the separate ones in `model`.

    Raises:
        Exception: whatever the tracer or the compiler raises for a model they cannot take.
    """

    def trace() -> fx.GraphModule:
        graph = trace_call(call, example)
        join_linears(graph, model)
        keep_angles(graph)
        return graph

    try:
        return compile_traced(trace, example, _OPTIONS, cache_dir)
    except Exception as error:
        for path in (str(cache_dir.absolute()), torch.__path__[0]):
            if " " in path:  # inductor hands it to the compiler without quotes, whose complaint names pieces of it
                raise BuildError(f"torch cannot compile where {path!r} holds a space: {error}") from error
        raise


def trace_call(call: ModelCall, example: Sequence[Tensor]) -> fx.GraphModule:
    """The operators of `call` on `example`: at least two rows with logits, and more without."""
    with torch.no_grad():
        graph: fx.GraphModule = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    gc.collect()  # the tracer, which refers to itself, has the weights too: those that are joined would stay
    return graph


def compile_traced(
    trace: Callable[[], fx.GraphModule], example: Sequence[Tensor], options: dict[str, Any], cache_dir: Path
) -> ModelCall:
    """Compile what `trace` returns, for any number of rows, with these options of inductor.

    Raises:
        Exception: whatever the tracer or the compiler raises.
    """
    import torch._inductor as inductor  # at import it looks for compilers
    from torch._inductor import config as inductor_config

    set_inductor_cache(private_folder(cache_dir) / f"inductor-{_processor_key()}")
    start = time.monotonic()
    operators = trace()
    graph = _SharingGraph(operators, operators.graph)
    del operators  # it knows the weights from before they were joined too
    traced = time.monotonic()
    with torch.no_grad(), inductor_config.patch(options):
        artifact: Any = inductor.standalone_compile(graph, list(example), dynamic_shapes="from_graph")
    _LOG.info("compiled: traced in %.1f s, compiled in %.1f s", traced - start, time.monotonic() - traced)

    def run(token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        result = artifact(token_ids, positions, logit_rows)
        logits: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return logits

    return run


def _processor_key() -> str:
    """Tells processors apart in a cache that several machines share: inductor's own keys do not.

    It would compile code made for vectors of eight numbers for vectors of sixteen, which then write beyond their rows.
    """
    target = f"{torch.backends.cpu.get_cpu_capability()} {native_target(LIBRARY)}"
    return hashlib.sha256(target.encode()).hexdigest()[:16]


def set_inductor_cache(directory: Path) -> None:
    """Inductor reads its cache directory from the environment only, and writes its own default there."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    name = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(name) in (None, os.path.abspath(default_cache_dir())):
        os.environ[name] = str(directory)


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
    owners = {id(module.packed): module for module in model.modules() if isinstance(module, PackedLinear)}
    readers: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.betoken.linear.default:
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


def constant_of(graph: fx.GraphModule, node: Any) -> Tensor | None:
    """The weight that a node of the graph stands for, None where it stands for another thing."""
    found = getattr(graph, str(node.target), None) if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return found if isinstance(found, Tensor) else None


def _can_join(modules: list[PackedLinear]) -> bool:
    return all(module.num_outputs % GROUP_COLUMNS == 0 for module in modules[:-1]) and all(
        (module.bias is None) == (modules[0].bias is None) for module in modules
    )


def _join(graph: fx.GraphModule, source: fx.Node, nodes: list[fx.Node], modules: list[PackedLinear], name: str) -> None:
    joined = torch.cat([module.packed for module in modules])
    start = 0
    for module in modules:  # the eager path reads the same memory
        end = start + module.packed.numel()
        module.packed = joined[start:end]
        start = end
    graph.register_buffer(name, joined)
    biases: list[Tensor] = [module.bias for module in modules if module.bias is not None]
    if biases:
        graph.register_buffer(f"{name}_bias", torch.cat(biases))
    last_dim = source.meta["val"].dim() - 1
    num_outputs = sum(module.num_outputs for module in modules)
    with graph.graph.inserting_before(nodes[0]):
        bias = graph.graph.get_attr(f"{name}_bias") if biases else None
        product = graph.graph.call_function(
            torch.ops.betoken.linear.default, (source, graph.graph.get_attr(name), bias, num_outputs)
        )
        start = 0
        for node, module in zip(nodes, modules, strict=True):
            end = start + module.num_outputs
            part = graph.graph.call_function(torch.ops.aten.slice.Tensor, (product, last_dim, start, end))
            node.replace_all_uses_with(part)
            start = end
    for node in nodes:
        graph.graph.erase_node(node)
