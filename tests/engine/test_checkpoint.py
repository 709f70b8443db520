"""Downloads of a hub repository and their progress. tests/e2e/test_hub.py has a responding hub."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.utils import filter_repo_objects

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights import checkpoint
from betoken.engine.weights.checkpoint import resolve_directory

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

    def snapshot_download(model: str, revision: str | None, tqdm_class: type, **patterns: tuple[str, ...]) -> str:
        fetched.extend(filter_repo_objects(REPOSITORY, **patterns))
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    assert resolve_directory("somebody/some-model", None) == tmp_path
    assert resolve_directory(str(tmp_path), None) == tmp_path
    with pytest.raises(ModelRefusedError, match=rf"revision 'v1' is one of the hub, and {tmp_path} is a directory"):
        resolve_directory(str(tmp_path), "v1")
    assert fetched == [name for name, is_wanted in REPOSITORY.items() if is_wanted]


def test_a_download_reports_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def snapshot_download(model: str, tqdm_class: Any, **_: Any) -> str:
        files, bytes_ = tqdm_class(total=2, desc="files"), tqdm_class(total=0, unit="B", disable=False, name="bytes")
        bytes_.update(100)  # of a file whose size is not known yet
        bytes_.total += 1000
        for _ in range(900):
            bytes_.update(1)
        bytes_.total += 3000  # the next file
        for _ in range(3000):
            bytes_.update(1)
        files.update(2)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    told: list[tuple[str, float]] = []
    resolve_directory("somebody/some-model", None, lambda stage, fraction: told.append((stage, fraction)))
    percents = [*range(10, 101), *range(25, 101)]
    assert told == [("downloading", percent / 100) for percent in percents]
    assert capfd.readouterr() == ("", "")
