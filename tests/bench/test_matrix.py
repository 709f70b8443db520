"""The matrix holds what the promise needs, in an order that restarts services least."""

from itertools import groupby, product

from betoken.bench.matrix import (
    BY_COST,
    CONCURRENCIES,
    DRAFT_LENGTHS,
    DRAFTERS,
    DRAFTINGS,
    DTYPES,
    TEMPERATURES,
    Disturbance,
    all_cells,
)
from betoken.drafters.registry import SPECS

CELLS = all_cells()


def test_names_are_unique() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_every_combination_is_there() -> None:
    undisturbed = {
        (cell.dtype, cell.temperature, cell.drafting.label, cell.num_draft_tokens, cell.concurrency)
        for cell in CELLS
        if not cell.disturbance
    }
    labels = [drafting.label for drafting in DRAFTINGS]
    wanted = set(product(DTYPES, TEMPERATURES, labels, DRAFT_LENGTHS, CONCURRENCIES))
    wanted |= set(product(DTYPES, TEMPERATURES, ["none", "ngram", "fused", "eagle3"], [BY_COST], CONCURRENCIES))
    assert undisturbed == wanted


def test_every_drafter_is_covered_and_every_one_that_can_branch_by_chains_and_by_trees() -> None:
    assert sorted(DRAFTERS) == sorted(SPECS)
    assert {drafting.label for drafting in DRAFTINGS} >= set(DRAFTERS), "stores of results know these names"
    ways = {drafter: [d for d in DRAFTINGS if d.drafter == drafter] for drafter in DRAFTERS}
    branching = {"model", "early_exit", "ngram", "lookahead", "eagle3"}
    assert {drafter for drafter, of in ways.items() if len(of) == 2} == branching


def test_every_disturbance_meets_every_dtype_and_temperature() -> None:
    disturbed = {(cell.dtype, cell.temperature, cell.disturbance) for cell in CELLS if cell.disturbance}
    assert disturbed == set(product(DTYPES, TEMPERATURES, set(Disturbance) - {Disturbance.NONE}))


def test_each_service_set_is_started_once_and_references_come_first() -> None:
    assert len(list(groupby(CELLS, key=lambda cell: (cell.dtype, cell.has_few_pages)))) == 2 * len(DTYPES)
    for index, cell in enumerate(CELLS):
        assert cell.reference in CELLS[: index + 1]
