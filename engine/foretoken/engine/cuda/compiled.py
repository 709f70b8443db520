"""A GPU forward as one compiled function: traced with a symbolic number of rows, fused by inductor.

Products, sums and attention stay opaque operators, so nothing that adds numbers up is inductor's: what it may choose
differently from one process to the next changes no bit.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from foretoken.engine.compiled import set_inductor_cache
from foretoken.engine.forward import ModelCall

_LOG = logging.getLogger(__name__)

_OPTIONS = {"size_asserts": False, "nan_asserts": False, "fallback_random": False}


def trace_call(call: ModelCall, example: Sequence[Tensor]) -> fx.GraphModule:
    """The operators of `call` on `example`: at least two rows with logits, and more without."""
    with torch.no_grad():
        graph: fx.GraphModule = make_fx(call, tracing_mode="symbolic", _allow_non_fake_inputs=True)(*example)
    return graph


def compile_call(call: ModelCall, example: Sequence[Tensor], cache_dir: Path) -> ModelCall:
    """Trace and compile for any number of rows.

    Raises:
        Exception: whatever the tracer or the compiler raises for a model they cannot take.
    """
    import torch._inductor as inductor  # at import it looks for compilers
    from torch._inductor import config as inductor_config

    set_inductor_cache(cache_dir / "inductor")
    start = time.monotonic()
    graph = trace_call(call, example)
    traced = time.monotonic()
    with torch.no_grad(), inductor_config.patch(_OPTIONS):
        artifact: Any = inductor.standalone_compile(graph, list(example), dynamic_shapes="from_graph")
    _LOG.info("compiled: traced in %.1f s, compiled in %.1f s", traced - start, time.monotonic() - traced)

    def run(token_ids: Tensor, positions: Tensor, logit_rows: Tensor) -> Tensor:
        result = artifact(token_ids, positions, logit_rows)
        logits: Tensor = result[0] if isinstance(result, (tuple, list)) else result
        return logits

    return run
