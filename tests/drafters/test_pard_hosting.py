"""Checkpoints of an attached PARD model are checked before the target is loaded."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.pard.hosting import memory_of
from tests.drafters.parallel import MASK, save_pard
from tests.drafters.pard2 import Pard2Rig, save_both, save_pard2


def settings(directory: Path | str) -> SimpleNamespace:
    return SimpleNamespace(pard=str(directory), dtype="float32", page_size=16)


def test_the_memory_of_a_pard_model_is_its_weights_and_a_page_for_each_of_the_targets(tmp_path: Path) -> None:
    directory = Path(save_pard(tmp_path))
    config = json.loads((directory / "config.json").read_text())
    memory = memory_of(settings(directory))
    assert memory.weight_bytes == (directory / "model.safetensors").stat().st_size
    width = config["num_key_value_heads"] * config["head_dim"]
    assert memory.page_bytes == 16 * config["num_hidden_layers"] * 2 * width * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pard_token": None}, "pard_token: is missing, an id below"),
        ({"pard_token": 1 << 20}, "pard_token: 1048576 is not an integer in"),
        ({"pard_token": MASK, "spd_type": "pard3"}, "spd_type: 'pard3' is not one of"),
        ({"num_attention_heads": 0}, "num_attention_heads: 0: must be an integer of at least 1"),
    ],
)
def test_a_wrong_pard_checkpoint_is_rejected_by_option_field_and_value(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    directory = save_pard(tmp_path, **fields)
    with pytest.raises(FailedPreconditionError, match=f"--pard = .*: {message}"):
        memory_of(settings(directory))


def test_a_pard_checkpoint_that_is_nowhere_is_rejected_by_option(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="--pard = .*absent"):
        memory_of(settings(tmp_path / "absent"))


def test_the_memory_of_a_pard2_model_holds_its_projection_and_the_vectors_of_each_position(tmp_path: Path) -> None:
    plain, with_states = (memory_of(settings(save(tmp_path / save.__name__))) for save in (save_pard, save_pard2))
    file = tmp_path / "save_pard2" / "warp_model.bin"
    assert with_states.weight_bytes == plain.weight_bytes + file.stat().st_size
    assert with_states.page_bytes == plain.page_bytes + (16 + 1) * 64 * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pard2_target_layers": None}, "pard2_target_layers: None: must be a list of layers"),
        ({"pard2_target_layers": []}, r"pard2_target_layers: \[\]: must be a list of layers"),
        ({"pard2_target_layers": [1, "2"]}, r"pard2_target_layers: \[1, '2'\]: must be a list of layers"),
        ({"pard2_target_layers": [True]}, r"pard2_target_layers: \[True\]: must be a list of layers"),
        ({"pard2_target_dim": 0}, "pard2_target_dim: 0: must be an integer of at least 1"),
        ({"pard2_target_dim": 255}, "pard2_target_dim: 255: must be a multiple of 4"),
        ({"pard2_scale": 0}, "pard2_scale: 0: must be a number above 0"),
        ({"pard2_scale": "1"}, "pard2_scale: '1': must be a number above 0"),
        ({"pard2_proj_bias": 1}, "pard2_proj_bias: 1: must be true or false"),
    ],
)
def test_wrong_fields_of_a_pard2_checkpoint_are_rejected_by_option_field_and_value(
    tmp_path: Path, fields: dict[str, object], message: str
) -> None:
    directory = save_pard2(tmp_path, **fields)
    with pytest.raises(FailedPreconditionError, match=f"--pard = .*: {message}"):
        memory_of(settings(directory))


def test_a_pard2_checkpoint_without_its_projection_is_rejected(tmp_path: Path) -> None:
    directory = save_pard2(tmp_path)
    (Path(directory) / "warp_model.bin").unlink()
    with pytest.raises(FailedPreconditionError, match="--pard = .*: warp_model.bin: is missing"):
        memory_of(settings(directory))


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"target_proj.weight": torch.zeros(64, 255)}, r"target_proj.weight: \[64, 255\]: must be \[64, 256\]"),
        ({"target_proj.weight": torch.zeros(64, 256, dtype=torch.int8)}, "target_proj.weight: torch.int8: must be a"),
        (
            {"target_proj.bias": torch.zeros(64)},
            r"target_proj.bias: does not belong to the projection \(pard2_proj_bias = F",
        ),
        ({"other.weight": torch.zeros(64)}, "other.weight: does not belong to the projection"),
        ({"target_proj.weight": None}, "must hold tensors by name"),
        ([1], "must hold tensors by name"),
    ],
)
def test_another_projection_than_the_configs_is_rejected_by_file_and_tensor(
    tmp_path: Path, tensors: Any, message: str
) -> None:
    target, directory = save_both(tmp_path, has_bias=False)
    good = {"target_proj.weight": torch.zeros(64, 256)}
    torch.save(good | tensors if isinstance(tensors, dict) else tensors, Path(directory) / "warp_model.bin")
    with pytest.raises(FailedPreconditionError, match=f"--pard = .*: warp_model.bin: {message}"):
        Pard2Rig(directory, target)


def test_a_projection_that_would_run_code_is_rejected(tmp_path: Path) -> None:
    target, directory = save_both(tmp_path)
    torch.save({"target_proj.weight": Path("x")}, Path(directory) / "warp_model.bin")
    with pytest.raises(FailedPreconditionError, match="--pard = .*: warp_model.bin: Weights only load failed"):
        Pard2Rig(directory, target)
