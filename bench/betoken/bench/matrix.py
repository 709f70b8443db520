"""The cells of the exactness matrix: which run is compared with which, in an order that restarts services least.

Pure data; nothing here starts or measures anything.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from betoken.drafters.registry import SPECS

NO_DRAFTER = "none"
DRAFTERS = tuple(SPECS)
"""Every drafter there is. One more is covered by adding its name here, with its trees or chains in `DRAFTINGS`."""
DRAFT_LENGTHS = (1, 4, 8)
BY_COST = 0
"""The draft length where a request is silent: as many tokens as pay."""
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


ATTACHED = tuple(name for name, spec in SPECS.items() if not spec.can_host)
"""Drafters that a verify worker has, and no draft worker can host."""

NO_DRAFTING = Drafting(NO_DRAFTER, NO_DRAFTER)
DRAFTINGS = (
    *(Drafting(name, name) for name in DRAFTERS),
    Drafting("model_tree", "model", (("max_branches", "3"),)),
    Drafting("early_exit_tree", "early_exit", (("max_branches", "3"),)),
    Drafting("ngram_chain", "ngram", (("max_branches", "1"),)),
    Drafting("lookahead_chain", "lookahead", (("guesses", "1"),)),
    Drafting("eagle3_chain", "eagle3", (("max_branches", "1"),)),
)
"""As each drafter does it by default, `ngram`, `lookahead` and `eagle3` with trees; and the other way."""


BY_COST_DRAFTINGS = tuple(drafting for drafting in DRAFTINGS if drafting.label in ("ngram", "fused", "eagle3"))
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
    def harms_draft_worker(self) -> bool:
        return self.disturbance in (Disturbance.DRAFT_KILLED, Disturbance.DRAFT_HUNG)

    @property
    def has_few_pages(self) -> bool:
        return self.disturbance is Disturbance.PREEMPTION


def all_cells() -> list[Cell]:
    """The whole matrix; cells that share a service set are neighbours, references come first."""
    cells = [cell for dtype in DTYPES for temperature in TEMPERATURES for cell in _cells_of(dtype, temperature)]
    return sorted(cells, key=lambda cell: (DTYPES.index(cell.dtype), cell.has_few_pages, not cell.is_reference))


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
    yield replace(drafted, drafting=by_label["eagle3"], disturbance=few_pages)
    yield replace(drafted, disturbance=Disturbance.DRAFT_KILLED)
    yield replace(drafted, disturbance=Disturbance.DRAFT_HUNG)
