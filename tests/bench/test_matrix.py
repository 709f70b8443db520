"""The matrix holds what the promise needs, in an order that restarts services least."""

from itertools import groupby, product

from foretoken.bench.matrix import CONCURRENCIES, DRAFT_LENGTHS, DRAFTERS, DTYPES, TEMPERATURES, Disturbance, all_cells

CELLS = all_cells()


def test_names_are_unique() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)


def test_every_combination_is_there() -> None:
    undisturbed = {
        (cell.dtype, cell.temperature, cell.drafter, cell.num_draft_tokens, cell.concurrency)
        for cell in CELLS
        if not cell.disturbance
    }
    wanted = set(product(DTYPES, TEMPERATURES, DRAFTERS, DRAFT_LENGTHS, CONCURRENCIES))
    wanted |= set(product(DTYPES, TEMPERATURES, ["none"], [0], CONCURRENCIES))
    assert undisturbed == wanted


def test_every_disturbance_meets_every_dtype_and_temperature() -> None:
    disturbed = {(cell.dtype, cell.temperature, cell.disturbance) for cell in CELLS if cell.disturbance}
    assert disturbed == set(product(DTYPES, TEMPERATURES, set(Disturbance) - {Disturbance.NONE}))


def test_each_service_set_is_started_once_and_references_come_first() -> None:
    assert len(list(groupby(CELLS, key=lambda cell: (cell.dtype, cell.has_few_pages)))) == 2 * len(DTYPES)
    for index, cell in enumerate(CELLS):
        assert cell.reference in CELLS[: index + 1]
