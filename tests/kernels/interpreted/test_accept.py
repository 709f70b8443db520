"""The Triton acceptance equals the reference on chains and trees of all sizes."""

import random

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.accept import accept
from tests.kernels.trees import random_parents


def random_blocks(rng: random.Random, sizes: list[int], reach: int) -> list[torch.Tensor]:
    """target_ids, draft_ids, parents, offsets over few ids, so that long paths are accepted; siblings may be equal."""
    parents = [parent for size in sizes for parent in random_parents(rng, size, reach)]
    num_nodes = len(parents)
    target_ids = [rng.choice([5, 5, 5, 7]) for _ in range(num_nodes + len(sizes))]
    draft_ids = [rng.choice([5, 5, 5, 7]) for _ in range(num_nodes)]
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + size)
    return [torch.tensor(column, dtype=torch.int64) for column in (target_ids, draft_ids, parents, offsets)]


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("reach", [1, 3, 600])
@pytest.mark.parametrize(
    "sizes", [[0], [1], [0, 0, 5, 0, 1, 127, 128, 129], [600], list(range(20)), []], ids=lambda sizes: f"{len(sizes)}b"
)
def test_triton_equals_reference(
    sizes: list[int], reach: int, is_chain: bool, device: torch.device, takes_triton
) -> None:
    target_ids, draft_ids, parents, offsets = random_blocks(random.Random(reach + len(sizes)), sizes, reach)
    arguments = [target_ids, draft_ids, None if is_chain else parents, offsets]
    with dispatch.override("reference"):
        expected = accept(*arguments)
    with takes_triton():
        results = accept(*(None if argument is None else argument.to(device) for argument in arguments))
    assert all(torch.equal(ours.cpu(), theirs) for ours, theirs in zip(results, expected, strict=True))


def test_a_long_chain_is_accepted_whole(device: torch.device, takes_triton) -> None:
    draft_ids = torch.arange(300, device=device)
    target_ids = torch.arange(301, device=device)
    with takes_triton():
        num_accepted, path, next_id = accept(target_ids, draft_ids, None, torch.tensor([0, 300], device=device))
    assert num_accepted.tolist() == [300] and next_id.tolist() == [300]
    assert torch.equal(path, draft_ids)
