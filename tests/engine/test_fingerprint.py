"""Fingerprints distinguish checkpoints and versions of the code."""

import struct
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.fingerprint import hash_sources, hash_weights


def save_checkpoint(directory: Path, tuned: str | None = None) -> str:
    """The fingerprint of three tensors of 256 KiB and an empty one, of which one may be another."""
    names = ("embed", "layer", "norm")
    tensors = {name: torch.full((256, 256), 1.0 + (name == tuned)) for name in names}
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    save_file(tensors | {"none": torch.zeros(0)}, directory / "model.safetensors", metadata={"format": "pt"})
    return hash_weights(directory)


def test_each_tensor_of_a_file_changes_the_fingerprint(tmp_path: Path) -> None:
    fingerprints = [save_checkpoint(tmp_path / str(tuned), tuned) for tuned in (None, "embed", "layer", "norm")]
    assert len(set(fingerprints)) == 4
    assert save_checkpoint(tmp_path / "again") == fingerprints[0]


def test_only_loaded_files_change_the_fingerprint(tmp_path: Path) -> None:
    """Others are there or not, by the way the checkpoint came to this machine."""
    directory = tmp_path / "model"
    fingerprint = save_checkpoint(directory)
    (directory / "consolidated.safetensors").write_bytes(b"the same weights, in their maker's own layout")
    assert hash_weights(directory) == fingerprint
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors nor model.safetensors.index"):
        hash_weights(directory)
    index = directory / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"embed": "part.safetensors", "layer": "part.safetensors"}}')
    assert len({hash_weights(directory), fingerprint}) == 2, "files count by name"
    index.write_text('{"weight_map": ["part.safetensors"]}')
    with pytest.raises(ModelRefusedError, match=r"model\.safetensors\.index\.json is not an index of weights"):
        hash_weights(directory)


HEADERS = [b'{"a": 1}', b"[]", b'{"a": {"data_offsets": [9, 3]}}', b'{"a": {"data_offsets": [-9, 3]}}']


@pytest.mark.parametrize("contents", [b"", b"\xff" * 100, *(struct.pack("<Q", len(text)) + text for text in HEADERS)])
def test_a_weight_file_without_a_header_is_rejected(contents: bytes, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").write_bytes(contents)
    with pytest.raises(ModelRefusedError, match=r"model\.safetensors is not a safetensors file"):
        hash_weights(tmp_path / "model")


def test_a_truncated_weight_file_is_named(tmp_path: Path) -> None:
    """As by a copy that broke off; the error of the library that reads it says not which of a hundred files it is."""
    save_checkpoint(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelRefusedError, match=r"model\.safetensors is cut off: it lacks 1000 bytes"):
        hash_weights(tmp_path / "model")


def test_source_code_changes_the_fingerprint_and_compiled_code_does_not(tmp_path: Path) -> None:
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "kernel.cpp").write_text("one")
    package = ModuleType("package")
    package.__path__ = [str(tmp_path)]
    before = hash_sources(package)
    (tmp_path / "part" / "kernel.pyc").write_text("made")
    assert hash_sources(package) == before
    (tmp_path / "part" / "kernel.cpp").write_text("two")
    assert hash_sources(package) != before
