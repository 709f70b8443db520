"""Every case that `betoken.bench.kernels` times passes that benchmark's own gate, at a small size."""

import pytest
import torch

from betoken.bench.gpu.case import Case, find_fault
from betoken.bench.gpu.paged_cases import Shape, paged_cases
from betoken.bench.gpu.product_cases import product_cases
from betoken.bench.gpu.sampling_cases import sampling_cases
from betoken.bench.gpu.state_cases import Layer, state_cases

SMALL_LAYERS = (
    Layer("delta", 2, 4, 16, 12, is_delta=True),
    Layer("plain", 2, 4, 16, 12, is_delta=False),
    Layer("rates", 1, 1, 16, 40, is_delta=False, has_rates=True),
)


def small_cases(device: torch.device) -> list[Case]:
    return [
        *sampling_cases(device, vocab_size=600, row_counts=(2,)),
        *paged_cases(device, Shape(num_heads=4, num_key_heads=2, size=16), max_context=40, num_sequences=5),
        *state_cases(device, SMALL_LAYERS, 40, 3),
        *product_cases(device, layers=((24, 40),), experts=((5, 24, 40),)),
    ]


NAMES = [f"{case.op} {case.shape}" for case in small_cases(torch.device("cpu"))]


@pytest.mark.parametrize("index", range(len(NAMES)), ids=NAMES)
def test_a_benchmarked_case_is_right(index: int, device: torch.device) -> None:
    torch.manual_seed(index)
    assert find_fault(small_cases(device)[index]) is None
