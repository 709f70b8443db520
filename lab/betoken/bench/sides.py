"""Sides of a drafter table, written as `drafter/setting=value/--option=value`.

A setting goes with each request. An option is the worker's that runs the drafter: the draft worker, or, for
`drafter@attached`, the verify worker. Sides that differ in options or in the worker need services of
their own. Pure data; knows no services.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from betoken.bench.drafter_names import drafter_named
from betoken.bench.matrix import NO_DRAFTER
from betoken.bench.streams import speculation
from betoken.client import Speculation
from betoken.drafters.registry import SPECS

NUM_DRAFT_TOKENS = "num_draft_tokens"
"""The one setting that is the request's and not the drafter's."""
OPTION = "--"
"""Prefix of a draft worker's option."""


Variant = tuple[bool, tuple[tuple[str, str], ...]]
"""Services for some sides: whether their drafters are attached, and the options of the worker that runs them."""
HOSTED: Variant = (False, ())


def _default_sides() -> Iterator[str]:
    for spec in sorted(SPECS.values(), key=lambda spec: spec.num_others):
        if spec.can_host and not spec.comes_first and not spec.simulates:
            side = f"{spec.name}/{NUM_DRAFT_TOKENS}=16" if spec.max_uncommitted is not None else spec.name
            own_model = (option for option in spec.options if option.names_weights and not option.names_target)
            yield from (side, *(f"{side}/{option.flag}=target" for option in own_model if not spec.can_attach))


DEFAULT_SIDES = tuple(_default_sides())
"""All drafters of draft workers. One with its own model drafts with the draft model and with a replica of the target;
one whose model verifies several guesses at once gets longer drafts."""


@dataclass(frozen=True, slots=True)
class Side:
    """A drafter with settings; `name` is how it was written."""

    name: str
    drafter: str
    settings: Mapping[str, str] = field(default_factory=dict)
    num_draft_tokens: int | None = None
    worker_options: tuple[tuple[str, str], ...] = ()
    """Options of the worker that runs it, each with its value."""
    is_attached: bool = False
    """Whether the verify worker runs it."""

    @property
    def variant(self) -> Variant:
        """Services that it runs on."""
        return self.is_attached, self.worker_options

    def speculation(self, num_draft_tokens: int | None) -> Speculation:
        """Content of a request; `num_draft_tokens` applies if the side names none."""
        return speculation(self.drafter, self.num_draft_tokens or num_draft_tokens, settings=self.settings)


PLAIN_DECODING = Side(NO_DRAFTER, NO_DRAFTER)


def parse_side(text: str) -> Side:
    """`ngram`, `ngram@attached`, `ngram/max_branches=1/num_draft_tokens=8`, `early_exit/--early-exit-layers=4`.

    Raises:
        ValueError: a setting without a value, a number of draft tokens that is none, or a drafter that no verify
            worker can attach.
    """
    named, *parts = text.split("/")
    drafter, is_attached = drafter_named(named)
    settings = dict(_setting(text, part) for part in parts)
    worker_options = tuple(sorted((name, settings.pop(name)) for name in list(settings) if name.startswith(OPTION)))
    num_draft_tokens = settings.pop(NUM_DRAFT_TOKENS, None)
    if num_draft_tokens is not None and not (num_draft_tokens.isdecimal() and int(num_draft_tokens) > 0):
        raise ValueError(f"{text}: {NUM_DRAFT_TOKENS} = {num_draft_tokens!r}, must be a whole number above 0")
    number = int(num_draft_tokens) if num_draft_tokens else None
    return Side(text, drafter, settings, number, worker_options, is_attached)


def hosted_drafters(sides: Sequence[Side]) -> list[str]:
    """The drafters a draft worker must host for them, each once."""
    return list(dict.fromkeys(side.drafter for side in sides if side.drafter != NO_DRAFTER))


def _setting(text: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not (name and equals and value):
        raise ValueError(f"{text}: {part!r}, must be setting=value")
    return name, value


def needs_draft_model(drafter: str) -> bool:
    """Whether `drafter` cannot be hosted without a draft model; drafters that choose among others then have too few."""
    spec = SPECS.get(drafter)
    return spec is not None and ("model" in spec.needs and spec.is_usual or spec.num_others > 0)
