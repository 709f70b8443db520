"""Adds the options of drafters to the settings class of a worker that may run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

from pydantic import AfterValidator, BaseModel, Field, create_model

from betoken.drafters.registry import SPECS
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterSpec

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def with_drafter_options(runs: Callable[[DrafterSpec], bool]) -> Callable[[type[SettingsT]], type[SettingsT]]:
    """A class decorator that adds the options of the drafters that the worker `runs`."""

    def add(cls: type[SettingsT]) -> type[SettingsT]:
        specs = [spec for spec in SPECS.values() if runs(spec)]
        options = {option.name: option for spec in specs for option in spec.all_options}
        made: Any = create_model(
            cls.__name__,
            __base__=cls,
            __module__=cls.__module__,
            __doc__=cls.__doc__,
            **{name: _field(option) for name, option in options.items()},
        )
        return cast(type[SettingsT], made)

    return add


def _field(option: Option) -> Any:
    """Type and field of an option, as pydantic takes them."""
    kind: Any = option.kind if option.default is not None else option.kind | None
    check = option.check
    if check is not None:
        kind = Annotated[kind, AfterValidator(lambda value: _checked(value, option.default, check))]
    field = Field(option.default, description=option.help, ge=option.lowest, le=option.highest)
    return kind, field


def _checked(value: Any, default: Any, check: Callable[[Any], object]) -> Any:
    if value != default:
        check(value)
    return value
