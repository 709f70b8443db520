"""Specs of all drafters of the project, in the order of the settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from betoken.drafters.plugin import is_plugin_path
from betoken.drafters.settings import Option as Option
from betoken.drafters.spec import DrafterSpec as DrafterSpec

_FOLDERS = (
    "fused",
    "model",
    "ngram",
    "suffix",
    "staged",
    "lookahead",
    "early_exit",
    "grammar",
    "medusa",
    "eagle3",
    "dflash",
    "mtp",
    "pard",
    "gemma4_assistant",
    "synthetic",
)
"""Folders with a `SPEC`. A new drafter is a folder and one line here."""

BUILT_IN = "builtin"
"""Name, in the settings of a verify worker, of the drafters whose weights the target's checkpoint holds."""

NO_DRAFTERS = "none"
"""No drafters, in the settings of a verify worker."""

_FOUND: list[DrafterSpec] = [import_module(f"{__package__}.{folder}").SPEC for folder in _FOLDERS]
SPECS: dict[str, DrafterSpec] = {spec.name: spec for spec in _FOUND}
"""Specs by name."""


def weight_options(runs: Callable[[DrafterSpec], bool]) -> list[Option]:
    """Options, each once, that name models or weights of drafters that a worker `runs`, except the target."""
    options = {option.name: option for spec in SPECS.values() if runs(spec) for option in spec.all_options}
    return [option for option in options.values() if option.names_weights and not option.names_target]


def target_options() -> list[Option]:
    """Options, each once, by which drafters of a draft worker name the target."""
    options = {option.name: option for spec in SPECS.values() if spec.can_host for option in spec.all_options}
    return [option for option in options.values() if option.names_target]


def usual_drafters(settings: Any) -> tuple[str, ...]:
    """Names of the usual drafters whose needs `settings` meet, the default first."""
    names = [spec.name for spec in SPECS.values() if spec.is_usual and spec.is_met_by(settings)]
    return tuple(name for name in names if len(names) > SPECS[name].num_others)


def usual_attached() -> tuple[str, ...]:
    """Names of the usual drafters that a verify worker can attach: built-in ones, and drafters that need only ids."""
    return BUILT_IN, *(
        spec.name for spec in SPECS.values() if spec.is_usual and spec.can_attach and not spec.num_others
    )


def predicting_drafters(names: Sequence[str]) -> list[str]:
    """Which of these hosted drafters look up what an answer is expected to say, themselves or by one of the others."""
    specs = [SPECS[name] for name in names if name in SPECS]
    is_any = any(spec.predicts for spec in specs)
    return [spec.name for spec in specs if spec.predicts or (is_any and spec.num_others)]


def check_drafters(names: Sequence[str], settings: Any) -> None:
    """Raises:
    ValueError: a name that is unknown or given twice, a need that `settings` do not meet, or an unused model.
    """
    for name in names:
        if reason := why_not_hosted(name):
            raise ValueError(f"--drafters = {name!r}: {reason}")
    if not names or len(set(names)) != len(names):
        raise ValueError("--drafters: must name at least one drafter, each once")
    specs = [SPECS[name] for name in names if name in SPECS]
    for spec in specs:
        _check_needs(spec, settings)
        if len(names) <= spec.num_others:
            raise ValueError(
                f"--drafters: `{spec.name}` chooses among the others, of which there must be {spec.num_others} at least"
            )
        if spec.check is not None:
            spec.check(settings)


def why_not_hosted(name: str) -> str:
    """Return why no draft worker hosts a drafter of that name, and what to do; empty if one can."""
    hosted = [spec.name for spec in SPECS.values() if spec.can_host]
    if name in hosted or is_plugin_path(name):
        return ""
    if name in SPECS:
        return "runs on verify workers only: name it in --attached-drafters"
    return f"must be among {', '.join(hosted)}, or a path package.module:Class"


def attached_names(names: tuple[str, ...]) -> tuple[str, ...]:
    """Attached drafters of a verify worker's settings, without the word for none."""
    return tuple(name for name in names if name != NO_DRAFTERS)


def check_attached(names: Sequence[str], settings: Any = None) -> None:
    """`settings`: the verify worker's, if known.

    Raises:
        ValueError: a name that no verify worker can attach, a duplicate, a drafter without others to choose among, or
            a need that `settings` do not meet.
    """
    known = [spec.name for spec in SPECS.values() if spec.can_attach]
    for name in names:
        if name == BUILT_IN:
            continue
        if name not in known:
            raise ValueError(f"--attached-drafters = {name!r}: must be among {', '.join((*known, BUILT_IN))}")
        if len(names) <= (least := SPECS[name].num_others):
            raise ValueError(
                f"--attached-drafters: `{name}` chooses among the others, of which there must be {least} at least"
            )
        if settings is not None:
            _check_needs(SPECS[name], settings)
    if len(set(names)) != len(names):
        raise ValueError(f"--attached-drafters = {','.join(names)}: must name each once")


def _check_needs(spec: DrafterSpec, settings: Any) -> None:
    if not spec.is_met_by(settings):
        known = " or ".join(f"--{option.replace('_', '-')}" for option in spec.needs)
        raise ValueError(f"{known}: must be given for the drafter `{spec.name}`")
