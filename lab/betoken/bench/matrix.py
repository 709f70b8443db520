"""The cells of the exactness matrix: which run is compared with which, in an order that restarts services least.

Pure data; nothing here starts or measures anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

from betoken.drafters.registry import SPECS

NO_DRAFTER = "none"
FUSED = "fused"
DRAFTERS = tuple(name for name, spec in SPECS.items() if spec.can_host and not spec.simulates)
"""Every drafter that a draft worker can host for a real target. Each is covered; `DRAFTINGS` has trees and chains."""
WITH_WEIGHTS = {
    spec.name: option for spec in SPECS.values() if spec.can_attach for option in spec.options if option.names_weights
}
"""Attached drafters with weights, and the verify worker's options that name these."""
BUILT_IN = tuple(name for name, spec in SPECS.items() if spec.is_built_in is not None)
"""Attached drafters whose weights some targets hold."""
MASKED, TRANSLATED = "masked", "translated"
"""Other draft models than the usual one: a PARD checkpoint, and a model with another tokenizer."""
DRAFT_LENGTHS = (1, 4, 8)
BY_COST = 0
"""Draft length of requests that set none: adaptive."""
CONCURRENCIES = (1, 8)
DTYPES = ("float32", "bfloat16")
TEMPERATURES = (0.0, 0.8)
TOP_P = 0.95


@dataclass(frozen=True, slots=True)
class Drafting:
    """A drafter with its settings: one way to draft."""

    label: str
    """Its part of a cell's name."""
    drafter: str
    settings: tuple[tuple[str, str], ...] = ()
    is_attached: bool = False
    """Whether the verify worker runs it."""
    model: str = ""
    """Draft model of its worker, `MASKED` or `TRANSLATED`; empty for the usual one."""


NO_DRAFTING = Drafting(NO_DRAFTER, NO_DRAFTER)
_TREE, _CHAIN = ("max_branches", "3"), ("max_branches", "1")


def _ways(name: str) -> Iterator[Drafting]:
    """An attached drafter as it drafts by default, and the other of chains and trees."""
    yield Drafting(name, name, (), True)
    settings = SPECS[name].settings
    default = None if settings is None else getattr(settings(), "max_branches", None)
    if default is not None:
        label, setting = (f"{name}_tree", _TREE) if default == 1 else (f"{name}_chain", _CHAIN)
        yield Drafting(label, name, (setting,), True)


DRAFTINGS = (
    *(Drafting(name, name) for name in DRAFTERS),
    Drafting("model_tree", "model", (_TREE,)),
    Drafting("model_pard", "model", model=MASKED),
    Drafting("model_pard_tree", "model", (_TREE,), model=MASKED),
    Drafting("model_translated", "model", model=TRANSLATED),
    Drafting("model_translated_tree", "model", (_TREE,), model=TRANSLATED),
    Drafting("early_exit_tree", "early_exit", (_TREE,)),
    Drafting("ngram_chain", "ngram", (_CHAIN,)),
    Drafting("lookahead_chain", "lookahead", (("guesses", "1"),)),
    Drafting("suffix_chain", "suffix", (_CHAIN,)),
    Drafting("ngram@attached", "ngram", (), True),
    Drafting("ngram_chain@attached", "ngram", (_CHAIN,), True),
    Drafting("suffix@attached", "suffix", (), True),
    Drafting("suffix_chain@attached", "suffix", (_CHAIN,), True),
    Drafting("fused@attached", "fused", (), True),
    *(drafting for name in (*WITH_WEIGHTS, *BUILT_IN) for drafting in _ways(name)),
)
"""As each drafter does it by default, with chains or with trees, and the other of both. `grammar` drafts for
constraints only, which no cell has."""


BY_COST_DRAFTINGS = tuple(
    drafting
    for drafting in DRAFTINGS
    if drafting.label in ("ngram", "suffix", "fused") or (drafting.is_attached and not drafting.settings)
)
"""Draftings whose draft lengths may follow costs."""


class Disturbance(StrEnum):
    """Faults done to the services while a cell runs."""

    NONE = ""
    PREEMPTION = "preemption"
    """So few KV pages that running sequences are preempted and recomputed."""
    DRAFT_KILLED = "draft-killed"
    """The draft worker gets SIGKILL mid-stream and is started again, several times."""
    DRAFT_HUNG = "draft-hung"
    """The draft worker gets SIGSTOP mid-stream and SIGCONT later, several times."""
    VERIFY_KILLED = "verify-killed"
    """The verify worker with the drafter gets SIGKILL mid-stream, several times; others lack the drafter."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of running all prompts."""

    dtype: str
    temperature: float
    drafting: Drafting = NO_DRAFTING
    num_draft_tokens: int = BY_COST
    concurrency: int = 1
    disturbance: Disturbance = Disturbance.NONE

    @property
    def name(self) -> str:
        """Unique, readable, stable between runs: what `--cells` matches."""
        length = "auto" if self.drafting != NO_DRAFTING and self.num_draft_tokens == BY_COST else self.num_draft_tokens
        how = f"{self.drafting.label}-k{length}-c{self.concurrency}"
        suffix = f"-{self.disturbance}" if self.disturbance else ""
        return f"{self.dtype}-t{self.temperature:g}-{how}{suffix}"

    @property
    def reference(self) -> "Cell":
        """The run it must equal: the same dtype and temperature, no drafter, one stream, undisturbed."""
        return Cell(self.dtype, self.temperature)

    @property
    def is_reference(self) -> bool:
        return self == self.reference

    @property
    def meets_transformers(self) -> bool:
        """Whether it is also held against `generate(do_sample=False)` of transformers."""
        return self.dtype == "float32" and self.temperature == 0

    @property
    def against(self) -> str:
        """The reference of its tokens; empty for a reference itself."""
        own = "" if self.is_reference else "own"
        return " and ".join(filter(None, (own, "transformers" if self.meets_transformers else "")))

    @property
    def harms_worker(self) -> bool:
        return self.disturbance in (Disturbance.DRAFT_KILLED, Disturbance.DRAFT_HUNG, Disturbance.VERIFY_KILLED)

    @property
    def has_few_pages(self) -> bool:
        return self.disturbance is Disturbance.PREEMPTION

    @property
    def services(self) -> "ServiceSet":
        """The services that it runs on."""
        attached = self.drafting.drafter if self.drafting.is_attached else ""
        has_spare = self.disturbance is Disturbance.VERIFY_KILLED
        return ServiceSet(self.dtype, self.has_few_pages, attached, has_spare, self.drafting.model)


class ServiceSet(NamedTuple):
    """The differences between the services of cells."""

    dtype: str
    has_few_pages: bool
    attached: str
    """Attached drafter of the verify worker, including its choices; there is then no draft worker. Empty =
    none."""
    has_spare: bool
    """Whether a second verify worker runs no drafter."""
    model: str
    """Draft model, see `Drafting`."""


def all_cells() -> list[Cell]:
    """The whole matrix; cells that share a service set are neighbours, references come first."""
    cells = [cell for dtype in DTYPES for temperature in TEMPERATURES for cell in _cells_of(dtype, temperature)]
    return sorted(cells, key=lambda cell: (DTYPES.index(cell.dtype), cell.services, not cell.is_reference))


def _cells_of(dtype: str, temperature: float) -> Iterator[Cell]:
    plain = Cell(dtype, temperature)
    for concurrency in CONCURRENCIES:
        yield replace(plain, concurrency=concurrency)
        for drafting in DRAFTINGS:
            for num_draft_tokens in DRAFT_LENGTHS:
                yield replace(plain, drafting=drafting, num_draft_tokens=num_draft_tokens, concurrency=concurrency)
        for drafting in BY_COST_DRAFTINGS:
            yield replace(plain, drafting=drafting, concurrency=concurrency)
    by_label = {drafting.label: drafting for drafting in DRAFTINGS}
    drafted = replace(plain, drafting=by_label["model"], num_draft_tokens=4, concurrency=8)
    few_pages = Disturbance.PREEMPTION
    yield replace(plain, concurrency=8, disturbance=few_pages)
    yield replace(drafted, disturbance=few_pages)
    yield replace(drafted, drafting=by_label["ngram"], disturbance=few_pages)
    yield replace(drafted, drafting=by_label["ngram"], num_draft_tokens=BY_COST, disturbance=few_pages)
    yield replace(drafted, drafting=by_label["model_tree"], disturbance=few_pages)
    yield replace(drafted, drafting=by_label["suffix"], disturbance=few_pages)
    yield replace(drafted, drafting=by_label["suffix"], disturbance=Disturbance.DRAFT_KILLED)
    for name in ("model_pard", "model_translated"):
        yield replace(drafted, drafting=by_label[name], disturbance=few_pages)
        yield replace(drafted, drafting=by_label[f"{name}_tree"], disturbance=few_pages)
        yield replace(drafted, drafting=by_label[name], disturbance=Disturbance.DRAFT_KILLED)
    for name in ("ngram@attached", "suffix@attached", "fused@attached", *WITH_WEIGHTS, *BUILT_IN):
        yield replace(drafted, drafting=by_label[name], disturbance=few_pages)
        yield replace(drafted, drafting=by_label[name], disturbance=Disturbance.VERIFY_KILLED)
    yield replace(drafted, disturbance=Disturbance.DRAFT_KILLED)
    yield replace(drafted, disturbance=Disturbance.DRAFT_HUNG)
