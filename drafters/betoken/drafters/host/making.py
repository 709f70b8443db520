"""Makes the drafters of a worker from their specs, and makes them again for a reload.

Imports torch only if a drafter does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from betoken.common.tokenizer_json import tokenizer_text
from betoken.drafters.drafter import Drafter
from betoken.drafters.plugin import is_plugin_path, load_plugin
from betoken.drafters.registry import BUILT_IN, SPECS
from betoken.drafters.spec import DrafterSpec, Memory
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1.types_pb2 import SourceInfo

if TYPE_CHECKING:
    from betoken.drafters.shared_pages import SharedPages
    from betoken.engine.runner import ModelRunner


class Models(Protocol):
    """Loads the models of drafters, each once."""

    def load(self, option: str, num_layers: int | None = None) -> tuple[ModelRunner, SharedPages]:
        """See `DrafterContext.model`."""
        ...

    def forget(self, option: str) -> None:
        """Load the model of this option again when it is next needed."""
        ...


class DrafterMaker:
    """The services of a worker to its drafters; a `DrafterContext`."""

    def __init__(self, settings: Any, names: Sequence[str], target: ModelRunner | None = None) -> None:
        """`names`: hosted drafters, in the order of the settings. `target`: model of a verify worker."""
        self.settings = settings
        self.max_prefill_tokens: int = settings.max_prefill_tokens or USUAL_PREFILL_ROWS
        self.models: Models | None = None
        """Set before drafters that run models are made."""
        self._names = names
        self._target = target
        # Plug-ins first, so that a bad one is rejected before any model is loaded.
        self._made = {name: load_plugin(name) for name in names if is_plugin_path(name)}

    def make(self) -> dict[str, Drafter]:
        """The hosted drafters by name.

        Raises:
            FailedPreconditionError: a drafter's model, weights or options do not fit, or are missing.
        """
        return {name: self.drafter(name) for name in self._names}

    def make_again(self, names: Collection[str]) -> dict[str, Drafter]:
        """New drafters in place of `names` and of all that share their models, with weights read again.

        Raises:
            FailedPreconditionError: see `make`; the drafters in use stay as they are.
        """
        options = {option for name in names if (option := self._used(name))}
        again = [name for name in self._names if name in names or self._used(name) in options]
        before = dict(self._made)
        for name in again:
            del self._made[name]
        if (models := self.models) is not None:
            for option in options:
                models.forget(option)
        try:
            return {name: self.drafter(name) for name in again}
        except BaseException:
            self._made = before
            raise

    def model(self, option: str, num_layers: int | None = None) -> tuple[ModelRunner, SharedPages]:
        """See `DrafterContext`."""
        assert self.models is not None, "a drafter that runs a model says so in its spec"
        return self.models.load(option, num_layers)

    def drafter(self, name: str) -> Drafter:
        """See `DrafterContext`."""
        if name not in self._made:
            self._made[name] = SPECS[name].make(self)
        return self._made[name]

    def others(self, name: str) -> dict[str, Drafter]:
        """See `DrafterContext`."""
        return {other: self.drafter(other) for other in self._names if other != name and _is_source(other)}

    def tokenizer_text(self) -> str:
        """See `DrafterContext`."""
        if self._target is not None:
            return self._target.info.tokenizer_text()
        return (self.settings.model and tokenizer_text(self.settings.model)) or ""

    def _used(self, name: str) -> str | None:
        return SPECS[name].used(self.settings) if name in SPECS else None

    @property
    def target(self) -> ModelRunner:
        """See `DrafterContext`."""
        assert self._target is not None, "a drafter that needs the target cannot be hosted here, as its spec says"
        return self._target


def source_infos(specs: Iterable[DrafterSpec], names: Sequence[str] = ()) -> list[SourceInfo]:
    """Names, colours and kinds of the sources of draft tokens: the specs', and plug-ins among `names`."""
    by_name = {source.name: source for spec in specs for source in spec.sources}
    infos = [
        SourceInfo(name=source.name, explains=source.explains, colour=source.colour) for source in by_name.values()
    ]
    plugins = [name for name in names if is_plugin_path(name)]
    return infos + [
        SourceInfo(name=name, explains=f"accepted from the plug-in {name}", colour="blue underline") for name in plugins
    ]


def resolve_built_in(settings: Any) -> tuple[str, ...]:
    """The attached drafters of a verify worker's settings, with built-in ones by their own names."""
    names: list[str] = []
    for name in settings.attached_drafters:
        is_all = name == BUILT_IN and not settings.synthetic
        names += [spec.name for spec in SPECS.values() if is_all and spec.is_built_in and spec.is_built_in(settings)]
        names += [name] if name != BUILT_IN else []
    return tuple(dict.fromkeys(names))


def attached_memory(settings: Any) -> Memory:
    """Memory of the attached drafters.

    Raises:
        FailedPreconditionError: weights of a drafter cannot be read.
    """
    taken = [memory(settings) for name in settings.attached_drafters if (memory := SPECS[name].memory) is not None]
    return Memory(sum(one.weight_bytes for one in taken), sum(one.page_bytes for one in taken))


def attached_layers(settings: Any, num_layers: int) -> list[int]:
    """Layers of a target with `num_layers` layers whose hidden states attached drafters read."""
    needs = [SPECS[name].features for name in settings.attached_drafters]
    return [layer for need in needs if need is not None for layer in need.layers(settings, num_layers)]


def _is_source(name: str) -> bool:
    """Whether `others` includes this drafter."""
    spec = SPECS.get(name)
    return spec is None or not (spec.num_others or spec.comes_first)
