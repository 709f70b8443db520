"""What is fetched of a hub repository, and what of it is held."""

import weakref
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from torch import Tensor, nn

from foretoken.engine import loading
from foretoken.engine.errors import ModelRefusedError
from foretoken.engine.row_linear import replace_linears

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


def test_a_layers_weights_are_let_go_of_when_another_layer_has_its_place() -> None:
    """Or all of a model's would be in memory twice for a while."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(4)))
    weights: list[weakref.ref[Tensor]] = []

    def make(weight: Tensor, bias: Tensor | None) -> nn.Module:
        assert all(earlier() is None for earlier in weights[:-1])
        weights.append(weakref.ref(weight))
        return nn.Identity()

    replace_linears(model, make)
    assert len(weights) == 4
