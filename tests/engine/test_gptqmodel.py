"""Layers that GPTQModel 7.6.0 quantised and wrote: our numbers are its own to the last bit.

`gptqmodel.safetensors` holds `down_proj` of a tiny model's last layer as seven runs of the package wrote it. Its
metadata has their configs, and the SHA-256 of what the package's TorchLinear dequantises with its scales in float32.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from betoken.engine.config import EngineConfig
from betoken.engine.weights.layers import GroupedLinear
from betoken.engine.weights.loading import load_model
from tests.engine import quantized_files as files
from tests.engine.tiny import save_tiny

WRITTEN = Path(__file__).with_name("gptqmodel.safetensors")
LAYER = "model.layers.1.mlp.down_proj"
with safe_open(WRITTEN, "pt") as opened:
    CASES: dict[str, dict[str, Any]] = {name: json.loads(text) for name, text in sorted(opened.metadata().items())}


@pytest.mark.parametrize("case", CASES)
def test_a_layer_of_gptqmodel_has_its_numbers_to_the_last_bit(case: str, tmp_path: Path) -> None:
    """Cases: bits, symmetric or asymmetric, ordered by activation or not, format."""
    config = CASES[case]["config"]
    save_tiny(tmp_path, "llama")
    less = 1 if config["checkpoint_format"] == "gptq" else 0
    files.write_quantized(tmp_path, config, files.store_gptq(config["bits"], config["group_size"], less))
    path = tmp_path / "model.safetensors"
    of_case = {name: tensor for name, tensor in load_file(WRITTEN).items() if name.startswith(f"{case}.")}
    written = {f"{LAYER}.{name.removeprefix(f'{case}.')}": tensor for name, tensor in of_case.items()}
    assert len(written) == 4
    save_file(load_file(path) | written, path, metadata={"format": "pt"})
    config = EngineConfig(str(tmp_path), dtype="bfloat16", num_pages=32, compile="off")
    loaded, _ = load_model(config, lambda stage, fraction: None)
    layer = loaded.get_submodule(LAYER)
    assert isinstance(layer, GroupedLinear)
    numbers = layer.grouped.dequantised().contiguous()
    assert hashlib.sha256(numbers.numpy().tobytes()).hexdigest() == CASES[case]["sha256"]


def test_the_gptqmodel_file_covers_all_versions_widths_orders_and_kinds_of_zeros() -> None:
    names = ("bits", "sym", "desc_act", "checkpoint_format")
    assert {name: len({case["config"][name] for case in CASES.values()}) for name in names} == dict.fromkeys(names, 2)
