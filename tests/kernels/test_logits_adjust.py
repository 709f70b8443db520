"""logits_adjust: order of operations, masks, rows left alone, refusals."""

from collections.abc import Iterator

import pytest
import torch

from betoken.kernels import dispatch, native
from betoken.kernels.logits_adjust import IMPLEMENTATIONS, logits_adjust

PATHS = [
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(not native.is_available(), reason="no C compiler")),
]


@pytest.fixture(params=PATHS, autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.override(request.param):
        assert dispatch.select(torch.device("cpu"), IMPLEMENTATIONS)[0] == request.param
        yield request.param


def adjust(
    logits: torch.Tensor, rows: list[dict[int, tuple[float, float, float]]], allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """The logits after adjustment; `rows`: per row {id: (bias, scale, penalty)}."""
    offsets = [0]
    for row in rows:
        offsets.append(offsets[-1] + len(row))
    entries = torch.tensor([values for row in rows for values in row.values()], dtype=torch.float32).view(-1, 3)
    ids = torch.tensor([token_id for row in rows for token_id in row], dtype=torch.int64)
    adjusted = logits.clone()
    logits_adjust(adjusted, torch.tensor(offsets), ids, *entries.t().contiguous(), allowed)
    return adjusted


def test_logits_adjust_applies_bias_then_scale_then_penalty() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.5, 3.0], [1.0, -1.0, 0.5, 3.0]])
    adjusted = adjust(logits, [{0: (1.0, 2.0, 0.25), 1: (-1.0, 2.0, 0.25)}, {3: (-4.0, 2.0, 0.0), 2: (0.0, 1.0, 9.0)}])
    assert adjusted.tolist() == [[0.75, -4.25, 0.5, 3.0], [1.0, -1.0, -8.5, -2.0]]


def test_an_infinite_penalty_masks() -> None:
    adjusted = adjust(torch.zeros(1, 3), [{1: (100.0, 0.5, torch.inf)}])
    assert adjusted.tolist() == [[0.0, -torch.inf, 0.0]]


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 63, 1000])
def test_logits_adjust_applies_the_bitmask(vocab_size: int) -> None:
    is_allowed = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) < 0.5
    words = torch.zeros(3, -(-vocab_size // 32), dtype=torch.int64)
    for row, token_id in is_allowed.nonzero().tolist():
        words[row, token_id >> 5] |= 1 << (token_id & 31)
    mask = (words - ((words >> 31) << 32)).to(torch.int32)
    adjusted = adjust(torch.ones(3, vocab_size), [{}, {0: (1.0, 1.0, 0.0)}, {}], mask)
    assert torch.equal(adjusted > -torch.inf, is_allowed)


def test_logits_adjust_without_entries_changes_no_logit() -> None:
    logits = torch.randn(4, 5)
    assert torch.equal(adjust(logits, [{}] * 4), logits)


@pytest.mark.skipif(not native.is_available(), reason="no C compiler")
def test_native_logits_adjust_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, 63, generator=generator) * 5
    logits[:, 5] = -torch.inf
    values = torch.randn(9, 63, 3, generator=generator)
    rows = [
        {v: (values[r, v, 0].item(), values[r, v, 1].abs().item(), values[r, v, 2].item()) for v in range(r * 7)}
        for r in range(9)
    ]
    allowed = torch.randint(-(2**31), 2**31, (9, 2), generator=generator).to(torch.int32)
    for mask in (None, allowed):
        with dispatch.override("reference"):
            expected = adjust(logits, rows, mask)
        with dispatch.override("native"):
            assert torch.equal(adjust(logits, rows, mask), expected)


def test_a_row_of_logits_adjust_does_not_depend_on_the_others() -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(70, 97, generator=generator)
    rows = [{(7 * r + j) % 97: (0.1 * j, 1.1, 0.3 * r) for j in range(r % 11)} for r in range(70)]
    together = adjust(logits, rows)
    for num_rows in range(1, 71):
        assert torch.equal(adjust(logits[:num_rows], rows[:num_rows]), together[:num_rows])


@pytest.mark.parametrize(
    ("broken", "name"),
    [
        ("logits", "logits"),
        ("strides", "logits"),
        ("offsets", "row_offsets"),
        ("order", "row_offsets"),
        ("end", "row_offsets"),
        ("ids", "ids"),
        ("range", "ids"),
        ("negative", "ids"),
        ("bias", "bias"),
        ("allowed", "allowed"),
    ],
)
def test_bad_arguments_of_logits_adjust_are_rejected(broken: str, name: str) -> None:
    logits, offsets, ids = torch.zeros(2, 40), torch.tensor([0, 1, 1]), torch.tensor([3])
    bias, allowed = torch.zeros(1), torch.zeros(2, 2, dtype=torch.int32)
    if broken == "logits":
        logits = logits.bfloat16()
    elif broken == "strides":
        logits = torch.zeros(40, 2).t()
    elif broken == "offsets":
        offsets = offsets[:2]
    elif broken == "order":
        offsets = torch.tensor([0, 2, 1])
    elif broken == "end":
        offsets = torch.tensor([0, 1, 2])
    elif broken == "range":
        ids = torch.tensor([40])
    elif broken == "negative":
        ids = torch.tensor([-1])
    elif broken == "ids":
        ids = ids.int()
    elif broken == "bias":
        bias = torch.zeros(2)
    else:
        allowed = allowed[:, :1]
    with pytest.raises(ValueError, match=f"{name} must"):
        logits_adjust(logits, offsets, ids, bias, torch.ones(1), torch.zeros(1), allowed)
