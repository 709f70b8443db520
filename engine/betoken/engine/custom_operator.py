"""Custom operators of torch: calls that a tracer keeps whole."""

from collections.abc import Callable
from typing import Any

import torch


def define_operator(name: str, schema: str, run: Callable[..., Any], shape: Callable[..., Any]) -> None:
    """Define the operator `name`, of the form namespace::name, on every device.

    Args:
        schema: arguments and results, as in `torch.library.define`.
        run: computes the result.
        shape: returns an empty result of the same shape and dtype, for tracers.
    """
    torch.library.define(name, schema)
    torch.library.impl(name, "CompositeExplicitAutograd", run)
    torch.library.register_fake(name, shape)
