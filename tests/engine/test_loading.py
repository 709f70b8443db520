"""What is fetched of a hub repository."""

from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

from foretoken.engine import loading
from foretoken.engine.errors import ModelRefusedError

REPOSITORY = {
    "config.json": True,
    "generation_config.json": True,
    "model.safetensors.index.json": True,
    "model-00001-of-00002.safetensors": True,
    "model-00002-of-00002.safetensors": True,
    "tokenizer.json": True,
    "chat_template.jinja": True,
    "README.md": False,
    "pytorch_model.bin": False,
    "consolidated.safetensors": False,
    "original/model.safetensors": False,
    "metal/model.bin": False,
}
"""File -> whether it is wanted."""


def test_weights_are_fetched_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fetched: list[str] = []

    def snapshot_download(model: str, revision: str | None, **patterns: tuple[str, ...]) -> str:
        fetched.extend(filter_repo_objects(REPOSITORY, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(loading, "snapshot_download", snapshot_download)
    assert loading.resolve_directory("somebody/some-model", None) == tmp_path
    assert loading.resolve_directory(str(tmp_path), None) == tmp_path
    with pytest.raises(ModelRefusedError, match=rf"revision 'v1' is one of the hub, and {tmp_path} is a directory"):
        loading.resolve_directory(str(tmp_path), "v1")
    assert fetched == [name for name, is_wanted in REPOSITORY.items() if is_wanted]
