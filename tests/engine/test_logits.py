"""Logits are the float32 sums of the last product, whatever the model's type and whatever scales them after it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from betoken.engine.bring_up.load import runner_of
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.weights.loading import load_model
from tests.engine.tiny import save_tiny


def as_they_are(sums: Tensor) -> Tensor:
    return sums


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize(
    ("family", "settings", "scaled"),
    [
        ("llama", {}, as_they_are),
        ("gpt_neox", {}, as_they_are),
        ("gpt2", {}, as_they_are),
        ("gemma2", {"final_logit_softcapping": 4.0}, lambda sums: 4 * torch.tanh(sums / 4)),
        ("granite_swa", {"logits_scaling": 3.0}, lambda sums: sums / 3),
    ],
)
def test_logits_are_the_sums_of_the_last_product(
    family: str,
    settings: dict[str, float],
    scaled: Callable[[Tensor], Tensor],
    has_kernels: bool,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not has_kernels:
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
        monkeypatch.setattr("betoken.engine.reference.block_linear._WIDENED_OUTPUTS", 40)  # of 101
    directory = save_tiny(tmp_path, family)
    config = EngineConfig(directory, dtype=dtype, num_pages=16, compile="off", self_check=False)  # type: ignore[arg-type]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    model, info = load_model(config, lambda stage, fraction: None)
    weight = model.get_output_embeddings().weight.double()
    runner = runner_of(config, model, info)
    rows: list[Tensor] = []
    model.get_output_embeddings().register_forward_pre_hook(lambda layer, given: rows.append(given[0][0]))
    (logits,) = forward_together(runner, [[3, 1, 4, 1, 5]])
    exact = scaled(rows[0][: len(logits)].double() @ weight.T)
    assert logits.dtype == torch.float32
    assert (logits - exact).abs().max() < 1e-5 * exact.abs().max(), (
        "rounded to a half type it is a hundred times as far"
    )


@pytest.mark.parametrize("has_kernels", [True, False])
def test_equal_ids_are_no_more_likely_than_their_sums(
    has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ids whose logits round to one number: the lower would win, by nothing but its number."""
    if not has_kernels:
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
    config = EngineConfig(save_tiny(tmp_path, "llama"), dtype="bfloat16", num_pages=16, compile="off", self_check=False)
    model, info = load_model(config, lambda stage, fraction: None)
    head = model.get_output_embeddings().weight
    head[8] = head[7]
    head[8, head[7].abs().argmin()] += head[7].abs().min() * 2**-6  # one rounding of the smallest
    runner = runner_of(config, model, info)
    (logits,) = forward_together(runner, [list(range(1, 40))])
    assert (logits[:, 7] != logits[:, 8]).float().mean() > 0.5
    assert (logits[:, 7].bfloat16() == logits[:, 8].bfloat16()).float().mean() > 0.5
