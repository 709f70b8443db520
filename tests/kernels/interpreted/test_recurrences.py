"""Triton's recurrences and convolutions over states: those of the references, whatever rows stand beside."""

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.linear_recurrence import linear_recurrence
from betoken.kernels.linear_recurrence.rule import RecurrentPool
from betoken.kernels.rows import TreePaths
from betoken.kernels.state_conv import state_conv
from betoken.kernels.state_rows import StateRows
from tests.kernels.recurrences import DELTA, LRU, SSD, Shape, Step, make_inputs, make_pool, make_rates, make_rows
from tests.products import covering

SHAPES = {
    "plain": Shape(),
    "bf16": Shape(dtype=torch.bfloat16),
    "decay per key": Shape(decay_size=8),
    "odd": Shape(key_heads=1, heads=3, key_size=5, value_size=35),
}
CASES = {
    f"{name}-{label}": (shape, rule)
    for name, shape in SHAPES.items()
    for label, rule in {"delta": DELTA, "ssd": SSD}.items()
}
CASES |= {
    "rates": (Shape(key_heads=1, key_size=16, heads=2, value_size=48, dtype=torch.bfloat16, has_rates=True), SSD),
    "groups with rates": (Shape(key_heads=2, key_size=5, heads=4, value_size=35, has_rates=True), SSD),
    "one key": (Shape(key_heads=1, key_size=1, heads=2, value_size=16, has_rates=True), LRU),
}
STEPS = [
    Step(2, 3, 5, 4, 6),  # two from the ring, one new row, three pending
    Step(0, 0, 0, 7, 7),
    Step(1, 0, 0, 8, 3, (-1, -1, 0, 1, 1)),
    Step(3, 4, 6, 3, 4, (-1, 0, -1, 2, 1)),  # a tree of which two nodes were there
]
NUM_ROWS = sum(step.num_rows for step in STEPS)


def moved(rows: StateRows, device: torch.device) -> StateRows:
    paths = rows.paths and TreePaths(rows.paths.starts.to(device), rows.paths.slots.to(device))
    columns = (rows.positions, rows.row_segments, rows.states, rows.applied, rows.first_slots, rows.committed)
    return StateRows(*(column.to(device) for column in columns), paths)


@pytest.mark.parametrize("name", CASES)
def test_the_recurrence_equals_its_reference(name: str, device: torch.device, takes_triton) -> None:
    (shape, rule), rows = CASES[name], make_rows(STEPS)
    rates = make_rates(shape)
    given = make_inputs(NUM_ROWS, shape).take(range(NUM_ROWS))
    theirs = make_pool(4, shape)
    with dispatch.override("reference"):
        expected = linear_recurrence(*given, theirs, rows, rule, rates)
    ours = RecurrentPool(*(tensor.to(device) for tensor in make_pool(4, shape)))
    with takes_triton():
        there = None if rates is None else rates.to(device)
        out = linear_recurrence(*(tensor.to(device) for tensor in given), ours, moved(rows, device), rule, there)
    tolerance = 2e-2 if shape.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.state.cpu(), theirs.state, rtol=tolerance, atol=tolerance)
    assert all(torch.equal(mine.cpu(), other) for mine, other in zip(ours[1:], theirs[1:], strict=True))


@pytest.mark.parametrize("name", ["plain-delta", "groups with rates"])
def test_a_recurrence_row_has_the_same_bits_alone(name: str, device: torch.device, takes_triton) -> None:
    shape, rule = CASES[name]
    rates = make_rates(shape)
    rates = None if rates is None else rates.to(device)
    given = [tensor.to(device) for tensor in make_inputs(NUM_ROWS, shape).take(range(NUM_ROWS))]

    def run(steps, part: slice) -> torch.Tensor:
        pool = RecurrentPool(*(tensor.to(device) for tensor in make_pool(4, shape)))
        with takes_triton():
            return linear_recurrence(
                *(tensor[part] for tensor in given), pool, moved(make_rows(steps), device), rule, rates
            )

    together, first = run(STEPS, slice(None)), 0
    for step in STEPS:
        part = slice(first, first + step.num_rows)
        assert torch.equal(run([step], part), together[part])
        first += step.num_rows


@pytest.mark.parametrize(
    ("shape", "dtype"), covering([(4, 33), (1, 600), (3, 1)], [torch.float32, torch.bfloat16], strength=1)
)
def test_the_convolution_equals_its_reference(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, takes_triton
) -> None:
    num_taps, num_channels = shape
    generator = torch.Generator().manual_seed(3)
    sizes = [(NUM_ROWS, num_channels), (num_taps, num_channels), (num_channels,), (4, 12, num_channels)]
    x, weight, bias, ring = (torch.randn(*size, generator=generator).to(dtype) for size in sizes)
    rows = make_rows(STEPS)
    for given in (None, bias):
        theirs, ours = ring.clone(), ring.to(device, copy=True)
        with dispatch.override("reference"):
            expected = state_conv(x, weight, given, theirs, rows)
        with takes_triton():
            there = None if given is None else given.to(device)
            out = state_conv(x.to(device), weight.to(device), there, ours, moved(rows, device))
        if dtype == torch.bfloat16 and device.type == "cpu":  # the interpreter truncates, a device rounds
            torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=1e-6)
        else:
            torch.testing.assert_close(out.cpu(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(ours.cpu(), theirs)
