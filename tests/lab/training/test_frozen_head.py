import pytest
import torch
import torch.nn.functional as F

from betoken.training import frozen_head
from betoken.training.frozen_head import frozen_cross_entropy


@pytest.mark.parametrize("piece_scores", [1, 7 * 50, 1 << 23])
def test_loss_and_gradient_are_those_of_all_rows_at_once(piece_scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frozen_head, "_PIECE_SCORES", piece_scores)
    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(23, 16, requires_grad=True), torch.randn(50, 16), torch.randint(50, (23,))
    whole = F.cross_entropy(hidden @ weight.T, labels, reduction="sum")
    (wanted,) = torch.autograd.grad(whole * 0.3, hidden)
    loss = frozen_cross_entropy(hidden, weight, labels)
    (found,) = torch.autograd.grad(loss * 0.3, hidden)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(found, wanted)


def test_no_piece_of_the_frozen_head_exceeds_the_score_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory: with all scores at once it is the vocabulary's times the rows'."""
    monkeypatch.setattr(frozen_head, "_PIECE_SCORES", 200)
    sizes: list[int] = []
    plain = torch.Tensor.log_softmax

    def noted(scores: torch.Tensor, dim: int) -> torch.Tensor:
        sizes.append(scores.numel())
        return plain(scores, dim)

    monkeypatch.setattr(torch.Tensor, "log_softmax", noted)
    frozen_cross_entropy(torch.randn(30, 8, requires_grad=True), torch.randn(50, 8), torch.zeros(30, dtype=torch.int64))
    assert max(sizes) == 200 and sum(sizes) == 30 * 50


def test_the_frozen_head_loss_is_the_same_without_gradients() -> None:
    hidden, weight, labels = torch.randn(9, 8, requires_grad=True), torch.randn(30, 8), torch.randint(30, (9,))
    with torch.no_grad():
        loss = frozen_cross_entropy(hidden, weight, labels)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, frozen_cross_entropy(hidden, weight, labels).detach())
