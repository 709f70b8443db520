"""Differences that the check at load time treats as rounding, and as faults."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from betoken.engine.bring_up import self_check
from betoken.engine.bring_up.self_check import check_against_eager
from betoken.engine.errors import ModelRefusedError

LENGTHS = (19, 1, 15)


def check(dtype: str, wrong_rows: set[int], is_mixture: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare logits of which some rows, counted over all sequences, are another token's."""
    expected = torch.randn(sum(LENGTHS), 101, generator=torch.Generator().manual_seed(0))
    ours = expected.clone()
    for row in wrong_rows:
        ours[row] = expected[(row + 1) % len(expected)]
    monkeypatch.setattr(self_check, "each_together", lambda runner, sequences: iter(ours.split(LENGTHS)))
    runner: Any = SimpleNamespace(info=SimpleNamespace(dtype=dtype))
    check_against_eager(runner, [[1] * length for length in LENGTHS], list(expected.split(LENGTHS)), is_mixture)


STRAYED = {2, 7, 11, 19, 23, 30}
"""Six rows of 35, the whole second sequence among them."""
TWO_SEQUENCES = set(range(19, 35))


def test_tokens_of_a_mixture_may_differ_at_load_in_a_half_type(monkeypatch: pytest.MonkeyPatch) -> None:
    check("bfloat16", STRAYED, True, monkeypatch)


@pytest.mark.parametrize(
    ("dtype", "wrong_rows", "is_mixture"),
    [
        ("bfloat16", STRAYED, False),
        ("float32", STRAYED, True),
        ("bfloat16", TWO_SEQUENCES, True),
        ("float16", TWO_SEQUENCES, True),
        ("float32", {19}, False),
    ],
)
def test_other_differences_at_load_are_faults(
    dtype: str, wrong_rows: set[int], is_mixture: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelRefusedError, match="from the model's own eager forward"):
        check(dtype, wrong_rows, is_mixture, monkeypatch)
