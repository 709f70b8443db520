import copy

import pytest
import torch
from torch import nn

from betoken.training.optimizer import Muon, PairOptimizer, orthogonalize


def test_orthogonalized_matrices_have_singular_values_near_one() -> None:
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalize(matrices))
    assert values.min() > 0.5 and values.max() < 1.4


def test_the_optimizer_update_follows_the_gradients_direction_at_any_scale() -> None:
    start, gradient = torch.zeros(8, 6), torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    results = []
    for scale in (1.0, 1e-3):
        param = nn.Parameter(start.clone())
        param.grad = gradient * scale
        Muon([param], lr=0.1).step()
        results.append(param.detach())
    assert torch.allclose(results[0], results[1], atol=5e-3)
    assert (results[0] * gradient).sum() < 0


@pytest.mark.parametrize("shape", [(8, 6), (6, 8), (5, 5)], ids=str)
def test_two_optimizer_steps_equal_the_update_written_out(shape: tuple[int, int]) -> None:
    """Nesterov momentum, the scale of tall matrices, and decay by the rate."""
    generator = torch.Generator().manual_seed(2)
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(3))
    param = nn.Parameter(start.clone())
    muon = Muon([param], lr=0.1, momentum=0.9, weight_decay=0.5)
    expected, average = start.clone(), torch.zeros(shape)
    for gradient in gradients:
        param.grad = gradient.clone()
        muon.step()
        average = 0.9 * average + 0.1 * gradient
        ahead = 0.1 * gradient + 0.9 * average
        is_tall = shape[0] > shape[1]
        direction = orthogonalize(ahead.mT[None])[0].mT if is_tall else orthogonalize(ahead[None])[0]
        expected = (1 - 0.1 * 0.5) * expected - 0.1 * max(1, shape[0] / shape[1]) ** 0.5 * direction
    assert torch.allclose(param.detach(), expected, atol=2e-3)


def test_the_optimizer_rejects_vectors() -> None:
    with pytest.raises(ValueError, match="matrices"):
        Muon([nn.Parameter(torch.zeros(3))], lr=0.1)


def test_restored_state_gives_the_same_next_step() -> None:
    def stepped(model: nn.Module, optimizer: PairOptimizer, num_steps: int) -> None:
        for _ in range(num_steps):
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step(scale=0.5)

    torch.manual_seed(0)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    one, two = (PairOptimizer(model, 0.1, 0.01, 0.1) for model in (first, second))
    stepped(first, one, 3)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    stepped(first, one, 2)
    stepped(second, two, 2)
    assert torch.equal(first.weight, second.weight) and torch.equal(first.bias, second.bias)
