"""Names of models: what is a path and means no model is refused before the hub is asked."""

from pathlib import Path

import pytest

from betoken.common.model_path import path_fault
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.checkpoint import resolve_directory
from betoken.router.text.tokenizer import Tokenizer, TokenizerError

PATHS = ["no/such/model.gguf", "model.gguf", "/no/such/model", "./none", "../none", "~nobody/x", "models/no/target"]


@pytest.mark.parametrize("model", PATHS)
def test_a_path_that_does_not_exist_is_not_taken_for_a_hub_id(model: str) -> None:
    assert path_fault(model).startswith("no such file or directory: name a directory, a GGUF file, or a hub id")
    with pytest.raises(ModelRefusedError, match="no such file or directory"):
        resolve_directory(model, None)
    with pytest.raises(TokenizerError, match="no such file or directory"):
        Tokenizer.load(model)


@pytest.mark.parametrize(
    "model", ["gpt2", "owner/name", "owner/name-v1.5", "owner/name:Q4_K_M", "owner/name:a/b-Q8_0.gguf"]
)
def test_a_name_that_may_be_a_hub_id_has_no_fault(model: str) -> None:
    assert path_fault(model) == ""


def test_a_model_file_that_is_not_gguf_is_rejected(tmp_path: Path) -> None:
    for name in ("a.gguf", "a.bin"):
        (tmp_path / name).touch()
    assert path_fault(str(tmp_path)) == path_fault(str(tmp_path / "a.gguf")) == ""
    assert path_fault(str(tmp_path / "a.bin")).startswith("is neither a directory nor a GGUF file")
    assert path_fault(str(tmp_path / ("m" * 300))).startswith("cannot be read: File name too long")
