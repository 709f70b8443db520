"""Loads a user's drafter by its dotted path, `package.module:ClassName`, and makes sure that it is one."""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, cast

from betoken.common.errors import FailedPreconditionError

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter

_MEMBERS = ("has_work", "open", "commit", "request", "close", "step", "check_integrity")


def is_plugin_path(name: str) -> bool:
    """Whether a drafter's name is a dotted path, `package.module:ClassName`."""
    module, colon, attribute = name.partition(":")
    return bool(colon) and attribute.isidentifier() and all(part.isidentifier() for part in module.split("."))


def load_plugin(path: str) -> Drafter:
    """An instance of the class, made without arguments.

    Raises:
        FailedPreconditionError: the class is missing, does not fit the protocol `Drafter`, or its making failed.
    """
    module_name, _, class_name = path.partition(":")
    try:
        cls = getattr(importlib.import_module(module_name), class_name)
    except (Exception, SystemExit) as error:  # the module is the user's, a script perhaps: importing may raise anything
        raise _refusal(path, f"cannot be imported: {type(error).__name__}: {error}") from error
    if not inspect.isclass(cls):
        raise _refusal(path, "is no class")
    missing = [name for name in _MEMBERS if not hasattr(cls, name)]
    if missing:
        raise _refusal(path, f"is not a Drafter: it lacks {', '.join(missing)}")
    try:
        return cast("Drafter", cls())
    except (Exception, SystemExit) as error:
        raise _refusal(path, f"cannot be made without arguments: {type(error).__name__}: {error}") from error


def _refusal(path: str, what: str) -> FailedPreconditionError:
    return FailedPreconditionError(f"--drafters = {path}: {what}")
