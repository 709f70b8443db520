"""Binds a module's forward to other functions than its file's. Nothing of transformers is changed."""

import inspect
from collections.abc import Callable, Mapping
from types import FunctionType, MethodType
from typing import Any


def own_forward(module: Any) -> Any:
    """The function that a module's class defines as its forward, without decorators."""
    return inspect.unwrap(type(module).forward)


def rebind(module: Any, functions: Mapping[str, Callable[..., Any]]) -> None:
    """Have a module's forward find these functions by name, not the functions of its file."""
    forward = own_forward(module)
    names = {**forward.__globals__, **functions}
    bound = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    bound.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(bound, module)
