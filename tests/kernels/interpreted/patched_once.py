"""Triton's interpreter without a search of `triton.language` at every call of a device function.

The interpreter replaces the language's functions when a kernel is launched, and looks for functions to replace again
at each call within, although they stay replaced until the kernel ends. That took most of the time of the tests.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@cache
def languages_of(function: Callable[..., Any]) -> list[Any]:
    """The modules of the language that a device function sees."""
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]


def install() -> None:
    """Let the interpreter replace functions once from now on."""
    replace = interpreter._patch_lang

    def replace_once(function: Callable[..., Any]) -> Any:
        if any(tl.core.is_builtin(language.load) for language in languages_of(function)):
            return replace(function)
        return interpreter._LangPatchScope()  # all of them are replaced

    interpreter._patch_lang = replace_once
