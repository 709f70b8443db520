"""Checkpoints whose experts are stored in MXFP4, as gpt-oss on the hub: served as the numbers they stand for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foretoken.engine.config import EngineConfig
from foretoken.engine.runner import ModelRunner
from foretoken.engine.self_check import forward_together
from tests.engine.tiny import save_tiny

# Open Compute Project, Microscaling Formats v1.0: E2M1 numbers, 32 of which share a power of two (bias 127).
NUMBERS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
GROUP = 32


def draw_experts(shape: torch.Size, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [E, K, N], and what a checkpoint stores of them: blocks [E, N, K / 32, 16], scales [E, N, K / 32]."""
    num_experts, num_inputs, num_outputs = shape
    lead = (num_experts, num_outputs, num_inputs // GROUP)
    codes = torch.randint(16, (*lead, GROUP), generator=generator)
    scales = torch.randint(121, 126, lead, generator=generator)
    numbers = NUMBERS[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (scales[..., None] - 127)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]  # the first of two in the low half of a byte
    return numbers.flatten(2).transpose(1, 2).contiguous(), blocks.byte(), scales.byte()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_it_has_the_bits_of_the_same_weights_stored_plainly(dtype: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    save_tiny(plain, "gpt_oss")
    packed.mkdir()
    weights = load_file(plain / "model.safetensors")
    stored, generator = dict(weights), torch.Generator().manual_seed(2)
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        weights[name], stored[f"{name}_blocks"], stored[f"{name}_scales"] = draw_experts(weights[name].shape, generator)
        del stored[name]
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    sequences = [[1, 2, 3, 4, 5], list(range(30, 70))]
    theirs, ours = (
        ModelRunner.load(EngineConfig(str(directory), dtype=dtype, num_pages=16, compile="off"))  # type: ignore[arg-type]
        for directory in (plain, packed)
    )
    assert theirs.info.weights_fingerprint != ours.info.weights_fingerprint
    for left, right in zip(forward_together(theirs, sequences), forward_together(ours, sequences), strict=True):
        assert torch.equal(left, right)
