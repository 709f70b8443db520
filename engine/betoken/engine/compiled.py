"""One function for any number of rows: a model call traced with symbolic sizes, then compiled by inductor.

It knows graphs and options, not which layers a device replaces.
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

from betoken.kernels.build import native_target
from betoken.kernels.code_folder import ROOM_BYTES, exclusive, private_folder
from betoken.kernels.cpu import LIBRARY

TensorCall = Callable[..., tuple[Tensor, ...]]
"""A function of tensors alone, such as a `ModelCall`."""

_LOG = logging.getLogger(__name__)

EXAMPLE_ROWS = 8
EXAMPLE_LOGITS = 6
"""Rows of the batch a compiled forward is traced on, and how many of them yield logits: another number, or the tracer
takes the two for one."""


class _SharingGraph(fx.GraphModule):
    """A graph with the weights that it reads, and no others; copies, such as inductor makes, have the same ones."""

    def __deepcopy__(self, memo: dict[int, Any]) -> fx.GraphModule:
        memo.update((id(tensor), tensor) for tensor in (*self.buffers(), *self.parameters()))
        copy: fx.GraphModule = super().__deepcopy__(memo)
        return copy


def trace_call(call: TensorCall, example: Sequence[Tensor]) -> fx.GraphModule:
    """The operators of `call` on `example`: at least two rows with logits, and more without."""
    with torch.no_grad():
        graph: fx.GraphModule = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    gc.collect()  # the tracer, which refers to itself, holds the weights too: joined weights would stay in memory
    return graph


def compile_traced(
    trace: Callable[[], fx.GraphModule],
    example: Sequence[Tensor],
    options: dict[str, Any],
    cache_dir: Path,
    keep: Callable[[fx.GraphModule, Any], None] | None = None,
) -> TensorCall:
    """Compile what `trace` returns, for any number of rows, with these options of inductor.

    Args:
        keep: called with the graph and inductor's artifact; None = the artifact is not kept.

    Raises:
        Exception: whatever the tracer or the compiler raises.
    """
    import torch._inductor as inductor  # at import it looks for compilers
    from torch._inductor import config as inductor_config

    folder, name = _select_folder(cache_dir)
    start = time.monotonic()
    operators = trace()
    graph = _SharingGraph(operators, operators.graph)
    del operators  # it knows the weights from before they were joined too
    traced = time.monotonic()
    # Workers of one model that start together: one compiles, the others find its code.
    lock = folder / f"{name}-{hashlib.sha256(graph.code.encode()).hexdigest()[:16]}.lock"
    with exclusive(lock), torch.no_grad(), inductor_config.patch(options):
        artifact: Any = inductor.standalone_compile(graph, list(example), dynamic_shapes="from_graph")
    _LOG.info("compiled: traced in %.1f s, compiled in %.1f s", traced - start, time.monotonic() - traced)
    if keep is not None:
        keep(graph, artifact)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(artifact(*tensors))

    return run


def load_artifact(path: Path, options: dict[str, Any], cache_dir: Path) -> Callable[..., Any]:
    """Load what inductor saved of a compiled function, whose arguments are the graph's tensors and then its inputs.

    Raises:
        Exception: whatever the loader raises.
    """
    from torch._inductor import config as inductor_config
    from torch._inductor.standalone_compile import CompiledArtifact

    _select_folder(cache_dir)
    with torch.no_grad(), inductor_config.patch(options):
        return CompiledArtifact.load(path=str(path), format="binary")


def _select_folder(cache_dir: Path) -> tuple[Path, str]:
    """The folder of compiled code, and the name of inductor's in it, which inductor uses from now on."""
    name = f"inductor-{_processor_key()}"
    folder = private_folder(cache_dir, 0 if (cache_dir / name).is_dir() else ROOM_BYTES)
    set_inductor_cache(folder / name)
    return folder, name


def _processor_key() -> str:
    """Distinguishes processors in a cache shared by several machines, unlike inductor's own keys.

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


def constant_of(graph: fx.GraphModule, node: Any) -> Tensor | None:
    """The weight that a node of the graph represents, None for other nodes."""
    found = getattr(graph, str(node.target), None) if isinstance(node, fx.Node) and node.op == "get_attr" else None
    return found if isinstance(found, Tensor) else None
