"""Default sampling of GGUF files."""

from pathlib import Path
from typing import Any

import pytest

from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.loading import load_model
from tests.engine.gguf_files import config_of, tiny_model, write_gguf


def sampling_of(directory: Path, **values: Any) -> dict[str, Any]:
    changes = {f"general.sampling.{key}": value for key, value in values.items()}
    path = write_gguf(directory / "tiny.gguf", model=tiny_model(num_layers=1), changes=changes)
    _, info = load_model(config_of(path), lambda stage, fraction: None)
    return info.default_sampling


def test_a_gguf_file_without_sampling_defaults_takes_those_of_llama_cpp(tmp_path: Path) -> None:
    assert sampling_of(tmp_path) == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


def test_sampling_defaults_of_a_gguf_file_are_taken_over(tmp_path: Path) -> None:
    given = sampling_of(tmp_path, temp=0.7, top_k=20, top_p=0.8, penalty_repeat=1.05)
    assert given == {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    assert sampling_of(tmp_path, temp=1.0) == {"temperature": 1.0}


@pytest.mark.parametrize(("key", "value"), [("temp", -1.0), ("top_p", 0.0), ("temp", "hot")])
def test_a_sampling_default_of_a_gguf_file_outside_its_limits_is_refused(tmp_path: Path, key: str, value: Any) -> None:
    with pytest.raises(ModelRefusedError, match=r"tiny\.gguf: (temperature|top_p) = .*: must be"):
        sampling_of(tmp_path, **{key: value})
