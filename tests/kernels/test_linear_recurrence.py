"""Linear recurrences: the rules by definition, and the bits of a row however its text was cut, drafted and rejected."""

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.cpu.recurrent import load_recurrent_kernels
from betoken.kernels.linear_recurrence import linear_recurrence, linear_recurrence_native, linear_recurrence_reference
from tests.kernels.recurrences import (
    DELTA,
    LRU,
    SSD,
    Inputs,
    Shape,
    Step,
    make_inputs,
    make_pool,
    make_rates,
    make_rows,
)

IMPLEMENTATIONS = {"reference": linear_recurrence_reference, "native": linear_recurrence_native}
SHAPES = {
    "plain": Shape(),
    "bf16": Shape(dtype=torch.bfloat16),
    "decay per key": Shape(decay_size=8),
    "one head": Shape(key_heads=1, heads=1, key_size=3, value_size=1),
    "wide": Shape(key_heads=2, heads=2, key_size=16, value_size=40),
    "strips": Shape(key_heads=1, heads=2, key_size=19, value_size=150, dtype=torch.bfloat16),
}
RULES = {"delta": DELTA, "ssd": SSD}
RATED = {
    "mamba": Shape(key_heads=1, key_size=16, heads=3, value_size=32, has_rates=True),
    "groups": Shape(key_heads=2, key_size=5, heads=4, value_size=19, dtype=torch.bfloat16, has_rates=True),
    "lru": Shape(key_heads=1, key_size=1, heads=2, value_size=16, has_rates=True),
}
CASES = [(shape, rule) for shape in SHAPES.values() for rule in RULES.values()]
CASES += [(RATED["mamba"], SSD), (RATED["groups"], SSD), (RATED["lru"], LRU)]
CASE_NAMES = [f"{name}-{rule}" for name in SHAPES for rule in RULES] + list(RATED)
cases = pytest.mark.parametrize(("shape", "rule"), CASES, ids=CASE_NAMES)


@pytest.fixture(params=IMPLEMENTATIONS)
def recur(request: pytest.FixtureRequest):
    if request.param == "native" and load_recurrent_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    return IMPLEMENTATIONS[request.param]


def literal(given: Inputs, rule, rates: torch.Tensor | None) -> torch.Tensor:
    """The rule as it is written, in double precision."""
    heads, size = given.value.shape[1], given.key.shape[2]
    group = heads // given.key.shape[1]
    state = torch.zeros(heads, size, given.value.shape[2], dtype=torch.float64)
    out = []
    for q, k, v, gates in zip(given.query, given.key, given.value, given.gates, strict=True):
        q, k = q.double().repeat_interleave(group, 0), k.double().repeat_interleave(group, 0)
        if rule.normalizes:
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        gates = gates.double()
        if rates is not None:
            state = state * torch.einsum("hde,he->hde", rates.double(), gates).exp()
            written = v.double() * (gates if rule.weighs else 1)
        else:
            state = state * gates[:, :-1].exp()[..., None]
            written = v.double() - (torch.einsum("hde,hd->he", state, k) if rule.is_delta else 0)
            written = written * gates[:, -1:]
        state = state + torch.einsum("hd,he->hde", k, written)
        out.append(torch.einsum("hde,hd->he", state, q * rule.scale))
    return torch.stack(out)


@cases
def test_rows_of_a_recurrence_follow_its_rule(recur, shape: Shape, rule) -> None:
    given, rates = make_inputs(21, shape), make_rates(shape)
    out = recur(*given.take(range(21)), make_pool(3, shape), make_rows([Step(1, 0, 0, 21, 21)]), rule, rates)
    tolerance = 2e-2 if shape.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), literal(given, rule, rates), rtol=tolerance, atol=tolerance)


@cases
def test_a_row_of_a_recurrence_has_the_same_bits_in_any_chunks(recur, shape: Shape, rule) -> None:
    given, others, rates = make_inputs(20, shape), make_inputs(9, shape, seed=5), make_rates(shape)
    whole = recur(*given.take(range(20)), make_pool(4, shape), make_rows([Step(2, 0, 0, 20, 20)]), rule, rates)
    pool, begin = make_pool(4, shape), 0
    for end in (1, 2, 9, 10, 20):  # with a different neighbour each time
        rows = make_rows([Step(3, 0, 0, 9, 9), Step(1, begin, begin, end - begin, end)])
        both = [torch.cat(pair) for pair in zip(others.take(range(9)), given.take(range(begin, end)), strict=True)]
        assert torch.equal(recur(*both, pool, rows, rule, rates)[9:], whole[begin:end])
        begin = end


@pytest.mark.parametrize(
    ("shape", "rule"),
    [(Shape(), DELTA), (Shape(), SSD), (RATED["groups"], SSD), (SHAPES["strips"], DELTA), (SHAPES["strips"], SSD)],
    ids=["delta", "ssd", "rates", "strips-delta", "strips-ssd"],
)
@pytest.mark.parametrize("seed", range(6))
def test_random_results_over_random_trees_leave_the_state_of_the_committed_text(
    recur, shape: Shape, rule, seed: int
) -> None:
    """The state after any drafts and results equals the state of the committed tokens in one pass, to the last bit."""
    rates, generator = make_rates(shape), torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    text, drafts = make_inputs(60, shape), make_inputs(200, shape, seed=7)
    pool, kept, applied, length, drafted = make_pool(2, shape), [], 0, 0, 0
    whole = recur(*text.take(range(60)), make_pool(1, shape), make_rows([Step(0, 0, 0, 60, 60)]), rule, rates)
    while length < 40:
        # A block: the last committed token, then nodes whose first path repeats the text as far as it is accepted.
        num_nodes = pick(0, 7)
        parents = [pick(-1, node - 1) for node in range(num_nodes)]
        path: list[int] = []
        for node, parent in enumerate(parents):
            if parent == (path[-1] if path else -1) and pick(0, 2):
                path.append(node)
        columns = [list(column) for column in text.take([length])]
        for node in range(num_nodes):
            source = text.take([length + 1 + path.index(node)]) if node in path else drafts.take([drafted + node])
            for column, part in zip(columns, source, strict=True):
                column += list(part)
        drafted += num_nodes
        rows = make_rows([Step(1, applied, length, 1 + num_nodes, length + 1, parents or None)])
        out = recur(*(torch.stack(column) for column in columns), pool, rows, rule, rates)
        for row, position in [(0, length), *((1 + node, length + 1 + i) for i, node in enumerate(path))]:
            assert torch.equal(out[row], whole[position])
        applied = length + 1
        for i, node in enumerate(path):  # the runner's compaction
            for ring in pool[1:]:
                ring[1, (applied + i) % len(ring[1])] = ring[1, (applied + node) % len(ring[1])]
        length += 1 + len(path)
        kept.append(length)
    recur(*text.take([length]), pool, make_rows([Step(1, applied, length, 1, length + 1)]), rule, rates)
    expected = make_pool(1, shape)
    recur(*text.take(range(length + 1)), expected, make_rows([Step(0, 0, 0, length + 1, length + 1)]), rule, rates)
    assert torch.equal(pool.state[1], expected.state[0])


def test_a_recurrence_over_several_forwards_has_the_bits_of_one(recur) -> None:
    shape = Shape()
    given = make_inputs(12, shape)
    whole = recur(*given.take(range(12)), make_pool(1, shape), make_rows([Step(0, 0, 0, 12, 12)]), DELTA)
    pool = make_pool(1, shape)
    recur(*given.take(range(5)), pool, make_rows([Step(0, 0, 0, 5, 5)]), DELTA)
    for slot in range(5, 12):  # a draft model goes on by one token; none is committed
        out = recur(*given.take([slot]), pool, make_rows([Step(0, 5, slot, 1, 5)]), DELTA)
        assert torch.equal(out[0], whole[slot])


@cases
def test_strided_rows_of_a_recurrence_have_the_same_bits(recur, shape: Shape, rule) -> None:
    dense, rates = make_inputs(9, shape).take(range(9)), make_rates(shape)
    step = make_rows([Step(0, 0, 0, 9, 6)])
    pools = [make_pool(1, shape), make_pool(1, shape)]
    expected = recur(*dense, pools[0], step, rule, rates)
    wide = torch.cat([rows.flatten(1) for rows in dense[:3]], dim=1).split([rows[0].numel() for rows in dense[:3]], 1)
    parts = [part.unflatten(1, rows.shape[1:]) for part, rows in zip(wide, dense[:3], strict=True)]
    assert torch.equal(recur(*parts, dense[3], pools[1], step, rule, rates), expected)
    assert all(torch.equal(one, other) for one, other in zip(*pools, strict=True))


@cases
def test_the_cpu_recurrence_is_used_and_agrees_with_the_reference(shape: Shape, rule) -> None:
    if load_recurrent_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    given, rates = make_inputs(14, shape), make_rates(shape)
    steps = make_rows([Step(1, 0, 0, 6, 6), Step(0, 0, 0, 8, 3, (-1, -1, 0, 1, 1))])
    ours, theirs = make_pool(2, shape), make_pool(2, shape)
    with dispatch.recording() as taken:
        out = linear_recurrence(*given.take(range(14)), ours, steps, rule, rates)
    assert taken == ["native"]
    expected = linear_recurrence_reference(*given.take(range(14)), theirs, steps, rule, rates)
    tolerance = 2e-2 if shape.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("field", "message"),
    [("key", "do not fit"), ("value", "multiple"), ("gates", "gates"), ("state", "pool.state")],
)
def test_recurrence_shapes_that_do_not_fit_are_rejected(field: str, message: str) -> None:
    shape = Shape()
    given, pool = make_inputs(2, shape), make_pool(1, shape)
    if field == "state":
        pool = pool._replace(state=pool.state[:, :1])
    else:
        setattr(given, field, getattr(given, field)[:, :, :1] if field == "key" else getattr(given, field)[:, :3])
    with pytest.raises(ValueError, match=message):
        linear_recurrence(
            given.query, given.key, given.value, given.gates, pool, make_rows([Step(0, 0, 0, 2, 2)]), DELTA
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rule": DELTA}, "the delta rule has no rates"),
        ({"rates": None}, "gates .* must be of 2 or 17 numbers a head"),
        ({"rates": torch.zeros(3, 16, 31)}, "rates .* must be dense float32"),
        ({"rates": torch.zeros(3, 16, 32).bfloat16()}, "rates .* must be dense float32"),
    ],
)
def test_recurrence_rates_that_do_not_fit_are_rejected(changes: dict[str, object], message: str) -> None:
    shape = RATED["mamba"]
    given = {"rule": SSD, "rates": make_rates(shape)} | changes
    with pytest.raises(ValueError, match=message):
        linear_recurrence(
            *make_inputs(2, shape).take(range(2)), make_pool(1, shape), make_rows([Step(0, 0, 0, 2, 2)]), **given
        )


def test_recurrence_values_without_weights_are_for_rates_alone() -> None:
    given = make_inputs(2, Shape()).take(range(2))
    with pytest.raises(ValueError, match="for rates alone"):
        linear_recurrence(*given, make_pool(1, Shape()), make_rows([Step(0, 0, 0, 2, 2)]), LRU)
