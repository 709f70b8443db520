"""The matrix holds what the promise needs, in an order that restarts services least."""

from itertools import groupby, product

from betoken.bench.drafter_names import ATTACHABLE
from betoken.bench.matrix import (
    BUILT_IN,
    BY_COST,
    CONCURRENCIES,
    DRAFT_LENGTHS,
    DRAFTERS,
    DRAFTINGS,
    DTYPES,
    MASKED,
    TEMPERATURES,
    TRANSLATED,
    WITH_WEIGHTS,
    Disturbance,
    all_cells,
)
from betoken.drafters.registry import SPECS

CELLS = all_cells()
MODELS = {"pard": MASKED, "translated": TRANSLATED}


def test_names_of_matrix_cells_are_unique() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_every_combination_is_in_the_matrix() -> None:
    undisturbed = {
        (cell.dtype, cell.temperature, cell.drafting.label, cell.num_draft_tokens, cell.concurrency)
        for cell in CELLS
        if not cell.disturbance
    }
    labels = [drafting.label for drafting in DRAFTINGS]
    wanted = set(product(DTYPES, TEMPERATURES, labels, DRAFT_LENGTHS, CONCURRENCIES))
    by_cost = ["none", "ngram", "suffix", "fused", "ngram@attached", "suffix@attached", "fused@attached"]
    by_cost += [*WITH_WEIGHTS, *BUILT_IN]
    wanted |= set(product(DTYPES, TEMPERATURES, by_cost, [BY_COST], CONCURRENCIES))
    assert undisturbed == wanted


def test_every_drafter_is_covered_and_every_one_that_can_branch_by_chains_and_by_trees() -> None:
    assert {*DRAFTERS, *WITH_WEIGHTS, *BUILT_IN, "grammar", "synthetic"} == set(SPECS)
    labels = {drafting.label for drafting in DRAFTINGS}
    assert labels >= {*DRAFTERS, *WITH_WEIGHTS, *BUILT_IN}, "stores of results know these names"
    assert labels >= set(ATTACHABLE) - {"grammar"}
    ways = {name: [d for d in DRAFTINGS if d.drafter == name and not d.is_attached] for name in DRAFTERS}
    assert {drafter for drafter, of in ways.items() if len(of) >= 2} == {
        *("model", "early_exit", "ngram", "suffix", "lookahead")
    }
    models = {drafting.label: drafting.model for drafting in DRAFTINGS if drafting.model}
    assert models == {f"model_{kind}{way}": model for kind, model in MODELS.items() for way in ("", "_tree")}
    attached = [drafting.drafter for drafting in DRAFTINGS if drafting.is_attached and drafting.drafter != "fused"]
    assert {name for name in attached if attached.count(name) == 2} == {
        *("ngram", "suffix", "medusa", "eagle3", "mtp", "pard")
    }


def test_every_disturbance_meets_every_dtype_and_temperature() -> None:
    disturbed = {(cell.dtype, cell.temperature, cell.disturbance) for cell in CELLS if cell.disturbance}
    assert disturbed == set(product(DTYPES, TEMPERATURES, set(Disturbance) - {Disturbance.NONE}))


def test_each_service_set_is_started_once_and_references_come_first() -> None:
    sets = {cell.services for cell in CELLS}
    assert len(list(groupby(CELLS, key=lambda cell: cell.services))) == len(sets)
    for dtype in DTYPES:
        own = [services for services in sets if services.dtype == dtype]
        # Plain and few pages, of three kinds of draft model; each attached drafter, and its spare too.
        assert len(own) == 6 + 3 * (3 + len(WITH_WEIGHTS) + len(BUILT_IN))
    for index, cell in enumerate(CELLS):
        assert cell.reference in CELLS[: index + 1]
