"""Settings of drafters, each declared once: a request may override it, a worker's option may set its default.

Needs neither torch nor pydantic, so that commands can list the options without the services.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from betoken.common.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Option:
    """A worker's option of a drafter."""

    name: str
    """Name in Python; `--some-name` on the command line."""
    kind: type[int] | type[bool] | type[str] | type[Path]
    default: Any
    help: str
    lowest: int | None = None
    highest: int | None = None
    check: Callable[[Any], object] | None = None
    """Raises ValueError for a bad value other than the default."""
    names_weights: bool = False
    """Whether it names a model or weights: `betoken up` and benchmarks have the option too."""
    names_target: bool = False
    """Whether it names the target, which `betoken up` knows."""

    @property
    def flag(self) -> str:
        """Its name on the command line."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True, slots=True)
class _Declared:
    """Declaration of a field by `setting`."""

    option: str | None
    help: str
    lowest: int | None
    highest: int | None
    check: Callable[[Any], object] | None


def setting(
    default: Any,
    help: str = "",
    lowest: int | None = None,
    highest: int | None = None,
    *,
    option: str | None = None,
    check: Callable[[Any], object] | None = None,
) -> Any:
    """A field of `SequenceSettings`.

    Args:
        help: description of the option.
        lowest, highest: bounds of a number.
        option: name of the worker's option; None = there is none.
        check: raises ValueError for a bad text.
    """
    return dataclasses.field(default=default, metadata={"": _Declared(option, help, lowest, highest, check)})


class SequenceSettings:
    """Base of a frozen dataclass whose fields, all of `setting`, a request may set by their names."""

    __slots__ = ()

    @classmethod
    def options(cls) -> tuple[Option, ...]:
        """The worker's options that set defaults."""
        return tuple(
            Option(said.option, type(default), default, said.help, said.lowest, said.highest, said.check)
            for _, default, said in _declared(cls)
            if said.option is not None
        )

    @classmethod
    def of_options(cls, options: Any) -> Self:
        """The defaults of a worker with these options."""
        given = {name: getattr(options, said.option) for name, _, said in _declared(cls) if said.option}
        made: Self = cast(Any, cls)(**given)
        return made

    def override(self, settings: Mapping[str, str]) -> Self:
        """These settings with a request's own.

        Raises:
            InvalidArgumentError: an unknown name, or a value outside its limits.
        """
        declared = {name: (default, said) for name, default, said in _declared(type(self))}
        check_names(settings, tuple(declared))
        read = {name: _read(settings, name, *declared[name]) for name in settings}
        new: Self = dataclasses.replace(cast(Any, self), **read)
        if (conflict := new.conflict()) is not None:
            name, limit = conflict
            raise InvalidArgumentError(f"drafter.settings.{name}", getattr(new, name), limit)
        return new

    def conflict(self) -> tuple[str, str] | None:
        """Name and limit of a field that does not fit another."""
        return None


def check_names(settings: Mapping[str, str], known: Collection[str]) -> None:
    """Raises:
    InvalidArgumentError: a setting that the drafter does not know.
    """
    for name in settings:
        if name not in known:
            limit = "must be one of " + ", ".join(known) if known else "must be empty, as this drafter has no settings"
            raise InvalidArgumentError("drafter.settings", name, limit)


def integer(settings: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    """The named setting; `default` if it is absent.

    Raises:
        InvalidArgumentError: the value is not an integer from `lowest` to `highest`.
    """
    text = settings.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not lowest <= int(text) <= highest:
        raise InvalidArgumentError(f"drafter.settings.{name}", text, f"must be an integer from {lowest} to {highest}")
    return int(text)


def _declared(cls: type[SequenceSettings]) -> list[tuple[str, Any, _Declared]]:
    """Name, default and declaration of every field."""
    return [(each.name, each.default, each.metadata[""]) for each in dataclasses.fields(cls)]  # type: ignore[arg-type]


def _read(settings: Mapping[str, str], name: str, default: Any, said: _Declared) -> Any:
    """The value of a setting that is there."""
    if isinstance(default, bool):
        return bool(integer(settings, name, int(default), 0, 1))
    if isinstance(default, int):
        return integer(settings, name, default, said.lowest or 0, said.highest or 0)
    if said.check is not None:
        try:
            said.check(settings[name])
        except ValueError as error:
            raise InvalidArgumentError(f"drafter.settings.{name}", settings[name], str(error)) from error
    return settings[name]
