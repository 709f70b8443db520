"""Checkpoints of an attached PARD model are checked before the target is loaded."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.pard.hosting import memory_of
from tests.drafters.parallel import MASK, save_pard


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
