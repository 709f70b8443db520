"""The Triton logits adjustment equals the reference bit for bit; a row does not depend on the others."""

import numpy as np
import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.logits_adjust import logits_adjust


def random_case(num_rows: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Logits with masked ids; per row (ids, bias, scale, penalty) of very different lengths; a bitmask."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32) * 5)
    logits[:, rng.integers(0, vocab_size, vocab_size // 4)] = -torch.inf
    entries = []
    for _ in range(num_rows):
        ids = torch.from_numpy(rng.permutation(vocab_size)[: rng.choice([0, 0, 1, 5, vocab_size])])
        values = torch.from_numpy(rng.normal(size=(3, len(ids))).astype(np.float32))
        values[1] = values[1].abs() + 0.1
        values[2, rng.random(len(ids)) < 0.1] = torch.inf
        entries.append((ids, *values))
    allowed = torch.from_numpy(rng.integers(-(2**31), 2**31, (num_rows, -(-vocab_size // 32))).astype(np.int32))
    return logits, entries, allowed


def adjust(logits: torch.Tensor, entries: list, allowed: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    adjusted = logits.to(device, copy=True)
    offsets = torch.tensor([0, *np.cumsum([len(row[0]) for row in entries])])
    columns = [torch.cat(column).to(device) for column in zip(*entries, strict=True)]
    logits_adjust(adjusted, offsets.to(device), *columns, None if allowed is None else allowed.to(device))
    return adjusted.cpu()


@pytest.mark.parametrize("vocab_size", [1, 63, 1000, 4099])
@pytest.mark.parametrize("num_rows", [1, 2, 33, 70])
def test_triton_logits_adjust_equals_the_reference(
    num_rows: int, vocab_size: int, device: torch.device, takes_triton
) -> None:
    logits, entries, allowed = random_case(num_rows, vocab_size, seed=num_rows + vocab_size)
    for mask in (None, allowed):
        with dispatch.override("reference"):
            expected = adjust(logits, entries, mask, torch.device("cpu"))
        with takes_triton():
            assert torch.equal(adjust(logits, entries, mask, device), expected)


def test_a_row_of_triton_logits_adjust_does_not_depend_on_the_others(device: torch.device, takes_triton) -> None:
    logits, entries, allowed = random_case(70, 97, seed=5)
    with takes_triton():
        together = adjust(logits, entries, allowed, device)
        for row in (0, 34, 69):
            part = slice(row, row + 1)
            assert torch.equal(adjust(logits[part], entries[part], allowed[part], device), together[part])


def test_triton_logits_adjust_takes_an_empty_batch(device: torch.device, takes_triton) -> None:
    nothing = torch.empty(0, device=device)
    with takes_triton():
        logits = torch.zeros(0, 5, device=device)
        logits_adjust(logits, torch.tensor([0], device=device), nothing.long(), nothing, nothing, nothing)
