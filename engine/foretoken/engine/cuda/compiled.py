"""A GPU forward as one compiled function: traced with a symbolic number of rows, fused by inductor.

Products, sums and attention stay opaque operators, so nothing that adds numbers up is inductor's: what it may choose
differently from one process to the next changes no bit.
"""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from foretoken.engine.compiled import compile_traced, trace_call
from foretoken.engine.forward import ModelCall

_OPTIONS = {"size_asserts": False, "nan_asserts": False, "fallback_random": False}


def compile_call(call: ModelCall, example: Sequence[Tensor], cache_dir: Path) -> ModelCall:
    """Trace and compile for any number of rows.

    Raises:
        Exception: whatever the tracer or the compiler raises for a model they cannot take.
    """
    return compile_traced(lambda: trace_call(call, example), example, _OPTIONS, cache_dir)
