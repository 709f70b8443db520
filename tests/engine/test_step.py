"""Linear layers read which sequence each token belongs to, through the runner, eagerly and compiled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.cuda.step_inputs import StepInputs
from betoken.engine.runner import ModelRunner
from betoken.engine.step import TokenAdapters
from tests.engine.tiny import save_tiny

NUM_ADAPTERS = 3


class Shifted(nn.Module):
    """A linear layer whose output is shifted by a vector of the token's sequence; by none for adapter 0."""

    def __init__(
        self, path: str, layer: nn.Module, num_outputs: int, token_adapters: TokenAdapters | None, adapter: int
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(len(path))
        table = torch.randn(NUM_ADAPTERS, num_outputs, generator=generator) * 0.1
        self.layer, self.table = layer, table.index_fill(0, torch.tensor([0]), 0.0)
        self.fixed, self.token_adapters = self.table[adapter].clone(), token_adapters

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        if self.token_adapters is None:
            return out + self.fixed.to(out.dtype)
        return out + self.table[self.token_adapters(x)].to(out.dtype).reshape(out.shape)


def runner_of(directory: str, compile: Any, fixed: list[Shifted] | None = None) -> ModelRunner:
    """A runner whose layers shift by their tokens' adapters, or by `fixed` of the layers appended to that list."""

    def wrap(path: str, layer: Any, token_adapters: TokenAdapters) -> nn.Module:
        num_outputs = layer.num_outputs if hasattr(layer, "num_outputs") else len(layer.weight)
        shifted = Shifted(path, layer, num_outputs, token_adapters if fixed is None else None, 1)
        if fixed is not None:
            fixed.append(shifted)
        return shifted

    settings: dict[str, Any] = {"num_pages": 32, "compile": compile, "wrap_linear": wrap}
    return load_runner(EngineConfig(directory, dtype="float32", self_check=fixed is None, **settings))


@pytest.mark.parametrize("mode", ["off", "on", "references"])
def test_a_linear_layer_sees_the_adapter_of_each_tokens_sequence(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "references":
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
    compile = "on" if mode == "on" else "off"
    directory = save_tiny(tmp_path / "model", "llama")
    texts = [[3, 1, 4, 1, 5, 9], [2, 7, 1], [8, 2, 8, 1]]
    runner = runner_of(directory, compile)
    assert runner.is_compiled == (mode == "on")
    pages = [runner.page_table.allocate(ids)[0] for ids in texts]
    segments = [
        Segment(own, 0, ids, 2, adapter=adapter) for own, ids, adapter in zip(pages, texts, (2, 0, 1), strict=True)
    ]
    together = runner.forward(segments).logits.clone().split(2)
    layers: list[Shifted] = []
    fixed = runner_of(directory, compile, layers)
    for logits, ids, adapter in zip(together, texts, (2, 0, 1), strict=True):
        for layer in layers:
            layer.fixed.copy_(layer.table[adapter])
        alone = fixed.forward([Segment(fixed.page_table.allocate(ids)[0], 0, ids, 2)]).logits
        assert torch.equal(logits, alone)


def test_adapters_of_a_recorded_step_are_those_of_its_last_batch() -> None:
    inputs = StepInputs(6, 4, 8, 9, torch.device("cpu"))
    inputs.fill(build_batch([Segment([0], 0, [1, 2], 1, adapter=2), Segment([1], 0, [3, 4, 5], 2, adapter=1)], 4, 8))
    assert inputs.token_adapters(False).tolist() == [2, 2, 1, 1, 1, 0]
    assert inputs.token_adapters(True)[:3].tolist() == [2, 1, 1]
    inputs.fill(build_batch([Segment([0], 0, [1, 2], 1)], 4, 8))
    assert inputs.token_adapters(False).tolist() == [0] * 6
