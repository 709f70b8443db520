"""The check at load that a device multiplies a row alike in any company."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from betoken.engine.cuda import row_experts
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_linear import RowLinear, find_row_dependence
from betoken.engine.weights.layers import replace_linears
from tests.engine.tiny import CONFIGS, MIXTURES


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 8, bias=False)).requires_grad_(False)
    replace_linears(layers, RowLinear)
    return layers


def test_an_independent_product_passes() -> None:
    assert find_row_dependence(model()) is None


@pytest.mark.parametrize("border", [16, 32, 64, 128])
def test_a_product_that_changes_beyond_a_border_is_found(border: int, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RowLinear.forward

    def changes(self: RowLinear, x: torch.Tensor) -> torch.Tensor:
        out = forward(self, x)
        return out if len(x) <= border or self.weight.shape[0] == 40 else torch.nextafter(out, out + 1)

    monkeypatch.setattr(RowLinear, "forward", changes)
    reason = find_row_dependence(model())
    assert reason is not None and "[8, 40]" in reason


@pytest.mark.parametrize("family", MIXTURES)
def test_an_expert_that_changes_in_company_is_found(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mixture = AutoModelForCausalLM.from_config(CONFIGS[family]()).eval()
    assert use_row_experts(mixture) and find_row_dependence(mixture) is None
    product = row_experts._one_expert

    def changes(module: Any, name: str, rows: torch.Tensor) -> torch.Tensor:
        out = product(module, name, rows)
        return out if len(rows) <= 32 or name != "down_proj" else torch.nextafter(out, out + 1)

    monkeypatch.setattr(row_experts, "_one_expert", changes)
    assert find_row_dependence(mixture) == "a row of an expert [64, 96] changes its bits among 1 rows"


def test_weights_stay_the_models_own_and_values_the_same() -> None:
    plain = nn.Linear(24, 40).requires_grad_(False)
    holder = nn.Sequential(plain)
    replace_linears(holder, RowLinear)
    (ours,) = holder
    assert isinstance(ours, RowLinear) and ours.weight.data_ptr() == plain.weight.data_ptr()
    x = torch.randn(2, 3, 24)
    torch.testing.assert_close(ours(x), plain(x))
