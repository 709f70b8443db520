"""Commands whose options are the fields of a dataclass, each declared once.

Knows typer; knows no command.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar, get_type_hints

OptionsT = TypeVar("OptionsT")


def command(run: Callable[[OptionsT], None], options: type[OptionsT]) -> Callable[..., None]:
    """`run` as a function of the fields of `options`, a dataclass, as typer takes one; required if without a default.

    A class's own fields come before inherited ones, and redeclared ones keep their position.
    """
    hints = get_type_hints(options, include_extras=True)
    required = inspect.Parameter.empty
    defaults = {
        field.name: required if field.default is MISSING else field.default
        for field in fields(options)  # type: ignore[arg-type]
    }
    names: dict[str, None] = {}
    for name in (name for owner in options.__mro__ for name in vars(owner).get("__annotations__", ())):
        names.pop(name, None)
        names[name] = None
    kind = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, kind, default=defaults[name], annotation=hints[name]) for name in names]

    def run_with(**values: Any) -> None:
        run(options(**values))

    run_with.__name__, run_with.__doc__ = run.__name__, run.__doc__
    run_with.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run_with.__annotations__ = {name: hints[name] for name in names}
    return run_with
