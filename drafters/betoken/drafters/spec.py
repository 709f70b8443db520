"""Description of a drafter: name, options, needs, its maker, the colour of its tokens.

Needs neither torch nor numpy, so that services can name every drafter before they load a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from betoken.drafters.settings import Option, SequenceSettings

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter
    from betoken.drafters.shared_pages import SharedPages
    from betoken.engine.runner import ModelRunner


class DrafterContext(Protocol):
    """A worker's services to the drafters that it makes."""

    @property
    def settings(self) -> Any:
        """The worker's settings, with every drafter's options."""
        ...

    @property
    def max_prefill_tokens(self) -> int:
        """Maximum number of prompt tokens in a forward with other sequences."""
        ...

    def model(
        self, option: str, num_layers: int | None = None, *, adds_to_embeddings: bool = False
    ) -> tuple[ModelRunner, SharedPages]:
        """The model that `option` of the settings names, its first `num_layers` only where given; loaded once.

        `adds_to_embeddings`: see `EngineConfig`; all drafters of a model want the same.

        Raises:
            FailedPreconditionError: it cannot be served; the text names the option.
        """
        ...

    def drafter(self, name: str) -> Drafter:
        """Another drafter, hosted by itself too or made for this one alone."""
        ...

    def others(self, name: str) -> dict[str, Drafter]:
        """The hosted drafters except `name`, in the order of the settings."""
        ...

    def tokenizer_text(self) -> str:
        """The target's tokenizer, or the draft model's, as the text of a tokenizer.json; empty if none is known."""
        ...

    @property
    def target(self) -> ModelRunner:
        """The target that an attached drafter drafts for: its description, and the parts it shares."""
        ...


@dataclass(frozen=True, slots=True)
class Source:
    """Where tokens come from, for people."""

    name: str
    explains: str
    """Words for such a token."""
    colour: str
    """One of the 16 colours of a terminal."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that an attached drafter takes on the target's device, bytes."""

    weight_bytes: int = 0
    page_bytes: int = 0
    """Memory per KV page of the target, bytes."""


@dataclass(frozen=True, slots=True)
class FeatureNeeds:
    """Which hidden states of the target a drafter reads."""

    layers: Callable[[Any, int], Sequence[int]]
    """Layers, by the worker's settings and the target's number of decoder layers n. They are numbered as transformers'
    `output_hidden_states`: 0 is what the first layer reads, i what layer i leaves (counted from 1), and n, or -1, the
    state after the final norm. None if the drafter reads no states of this target."""
    is_optional: bool = False
    """Whether it also drafts without them, for targets that have none."""
    of_whole_text: bool = False
    """Whether rows of all positions are needed. Then a sequence computes its prompt itself; other sequences take over
    cached pages, whose rows are not observed."""
    steers_by_whole_text: bool = False
    """Whether it needs them if the target's tokens depend on drafts, which then must repeat."""
    embeds: bool = False
    """Whether it may look up embeddings of the target."""


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One drafter of the registry."""

    name: str
    """Name in settings, requests, statistics and provenance."""
    make: Callable[[DrafterContext], Drafter]
    """Makes the drafter; imports what it needs."""
    explains: str = ""
    """Words for a token that it proposed; empty where its tokens are proposed by others."""
    colour: str = ""
    """One of the 16 colours of a terminal for such tokens."""
    needs: tuple[str, ...] = ()
    """Settings of which one must be given; it uses the first that is."""
    runs_model: bool = False
    """Whether it needs the packages of models: torch and transformers."""
    is_usual: bool = False
    """Whether it is hosted by default if its needs are met."""
    is_built_in: Callable[[Any], bool] | None = None
    """Whether the target's checkpoint, by a verify worker's settings, holds its weights; logs why they cannot be used.
    None = it has no weights, or they are in other files."""
    can_attach: bool = False
    """Whether a verify worker can run it between its forwards: it needs the sequences' ids, and `features`, alone."""
    can_host: bool = True
    """Whether a draft worker can host it; not if it reads features."""
    features: FeatureNeeds | None = None
    """Hidden states of the target that it reads when attached; see `betoken.drafters.features`."""
    reads_target_kv: bool = False
    """Whether it reads the target's KV (`DraftSequence.target_kv`), of which a rank holds a part."""
    memory: Callable[[Any], Memory] | None = None
    """Memory when attached, by the worker's settings; None = negligible."""
    num_others: int = 0
    """Other drafters that must be hosted together with it, as it chooses among them."""
    comes_first: bool = False
    """Whether its drafts, made by `propose` alone, precede drafts of the sequence's own drafter. No drafter chooses
    it."""
    max_uncommitted: Callable[[Any], int] | None = None
    """Most rows after the committed ids in a forward of its model, by the worker's settings; None = a draft block's."""
    simulates: bool = False
    """Whether its drafts are simulated, for a synthetic target only."""
    translates: bool = False
    """Whether it can draft with a model that has another tokenizer than the target."""
    predicts: bool = False
    """Whether it looks up what an answer is expected to say (`DraftSequence.predicted_ids`)."""
    other_sources: tuple[Source, ...] = ()
    """Further sources of its tokens."""
    check: Callable[[Any], None] | None = None
    """Raises ValueError for settings that it cannot be made with."""
    settings: type[SequenceSettings] | None = None
    """Settings of a request's drafter, whose defaults are options of the worker."""
    options: tuple[Option, ...] = ()
    """Other options of a worker that may run it."""

    @property
    def all_options(self) -> tuple[Option, ...]:
        """Options of a worker that may run it."""
        return self.options + (self.settings.options() if self.settings is not None else ())

    @property
    def sources(self) -> tuple[Source, ...]:
        """All sources of its tokens."""
        own = (Source(self.name, self.explains, self.colour),) if self.explains else ()
        return own + self.other_sources

    @property
    def needs_features(self) -> bool:
        """Whether it cannot draft for a target without hidden states."""
        return self.features is not None and not self.features.is_optional

    def used(self, settings: Any) -> str | None:
        """The setting of `needs` that it would use; None if none is given or needed."""
        return next((option for option in self.needs if getattr(settings, option)), None)

    def is_met_by(self, settings: Any) -> bool:
        """Whether `settings` give what it needs."""
        return not self.needs or self.used(settings) is not None
