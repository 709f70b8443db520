"""Makes the drafters of a worker from their specs, and makes them again for a reload.

Imports torch only if a drafter does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from betoken.common.errors import FailedPreconditionError
from betoken.common.tokenizer_json import tokenizer_text
from betoken.drafters.drafter import Drafter
from betoken.drafters.model import TARGET_TOKENIZER
from betoken.drafters.plugin import is_plugin_path, load_plugin
from betoken.drafters.registry import BUILT_IN, SPECS
from betoken.drafters.spec import DrafterSpec, Memory
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1.types_pb2 import SourceInfo

if TYPE_CHECKING:
    from betoken.drafters.shared_pages import SharedPages
    from betoken.drafters.translated.drafter import Translated
    from betoken.drafters.translated.making import Translator
    from betoken.drafters.translated.translation import Translation
    from betoken.engine.runner import ModelRunner


class Models(Protocol):
    """Loads the models of drafters, each once."""

    def load(
        self, option: str, num_layers: int | None = None, *, adds_to_embeddings: bool = False
    ) -> tuple[ModelRunner, SharedPages]:
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
        self._translated: dict[str, Translated] = {}
        """Translated drafters by name; the drafters that they translate for are in `_made`."""
        self._translations: dict[str, Translation | None] = {}
        """Translations of the models, by option; None for a model with the target's tokenizer."""
        self.translator = _translator(getattr(settings, TARGET_TOKENIZER.name, "") if target is None else "")
        """Translates drafts of models with another tokenizer; None if all models have the target's."""

    @property
    def translation(self) -> Translation | None:
        """Translation of the first model with another tokenizer than the target's; None without such a model."""
        return next((each for each in self._translations.values() if each is not None), None)

    def make(self) -> dict[str, Drafter]:
        """The hosted drafters by name.

        Raises:
            FailedPreconditionError: a drafter's model, weights or options do not fit, or are missing.
        """
        return {name: self._hosted(name) for name in self._names}

    def make_again(self, names: Collection[str]) -> dict[str, Drafter]:
        """New drafters in place of `names` and of all that share their models, with weights read again.

        Raises:
            FailedPreconditionError: see `make`; the drafters in use stay as they are.
        """
        options = {option for name in names if (option := self._used(name))}
        again = [name for name in self._names if name in names or self._used(name) in options]
        before = self._made, self._translated
        self._made = {name: made for name, made in self._made.items() if name not in again}
        self._translated = {name: made for name, made in self._translated.items() if name not in again}
        if (models := self.models) is not None:
            for option in options:
                models.forget(option)
        try:
            return {name: self._hosted(name) for name in again}
        except BaseException:
            self._made, self._translated = before
            raise

    def model(
        self, option: str, num_layers: int | None = None, *, adds_to_embeddings: bool = False
    ) -> tuple[ModelRunner, SharedPages]:
        """See `DrafterContext`."""
        assert self.models is not None, "a drafter that runs a model says so in its spec"
        runner, pages = self.models.load(option, num_layers, adds_to_embeddings=adds_to_embeddings)
        if self.translator is not None:
            runner, self._translations[option] = self.translator.translate(runner)
        return runner, pages

    def drafter(self, name: str) -> Drafter:
        """See `DrafterContext`."""
        if name not in self._made:
            self._made[name] = load_plugin(name) if is_plugin_path(name) else SPECS[name].make(self)
        return self._made[name]

    def others(self, name: str) -> dict[str, Drafter]:
        """See `DrafterContext`."""
        return {other: self._hosted(other) for other in self._names if other != name and _is_source(other)}

    def tokenizer_text(self) -> str:
        """See `DrafterContext`."""
        if self._target is not None:
            return self._target.info.tokenizer_text()
        if self.translator is not None:
            return self.translator.tokenizer_json
        return (self.settings.model and tokenizer_text(self.settings.model)) or ""

    def _hosted(self, name: str) -> Drafter:
        """The drafter as the host has it, with the target's ids.

        Raises:
            FailedPreconditionError: it cannot draft with a model that has another tokenizer.
        """
        drafter, option = self.drafter(name), self._used(name)
        if option is None or (translation := self._translations.get(option)) is None:
            return drafter
        if not SPECS[name].translates:
            text = f"{getattr(self.settings, option)}: `{name}` needs a model with the target's tokenizer"
            raise FailedPreconditionError(f"--{option.replace('_', '-')} = {text} (--target-tokenizer)")
        if name not in self._translated:
            from betoken.drafters.translated.drafter import Translated

            self._translated[name] = Translated(drafter, translation)
        return self._translated[name]

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


def _translator(source: str) -> Translator | None:
    """A translator to the tokenizer that --target-tokenizer names; None without one.

    Raises:
        FailedPreconditionError: the tokenizer cannot be read.
    """
    if not source:
        return None
    from betoken.drafters.translated.making import Translator  # needs tokenizers, which n-grams do without

    return Translator(source)
