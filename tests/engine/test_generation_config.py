"""generation_config.json: what is taken over, what is refused with its name, what is ignored aloud."""

import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import LlamaConfig

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.generation_config import GenerationDefaults, generation_defaults
from tests.engine.tiny import save_tiny


def defaults(directory: Path, **settings: Any) -> GenerationDefaults:
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return generation_defaults(directory, SimpleNamespace(config=LlamaConfig(eos_token_id=7)), vocab_size=101)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("betoken")]


def test_supported_generation_settings_are_defaults(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.0}
    lengths = {"repetition_penalty": 1.1, "max_new_tokens": 2048, "min_new_tokens": 1}
    found = defaults(tmp_path, **settings, **lengths, eos_token_id=[100, 0])
    assert found == GenerationDefaults({**settings, **lengths}, (100, 0)) and not warnings(caplog)


def test_generation_settings_that_mean_all_or_nothing_are_absent(tmp_path: Path) -> None:
    assert defaults(tmp_path, top_k=-1, top_p=None, temperature=0.0) == GenerationDefaults({"temperature": 0.0}, (7,))
    assert defaults(tmp_path, top_k=50.0).sampling == {"top_k": 50}


@pytest.mark.parametrize("value", [1e-6, 0.0099, 5e-324])
def test_a_temperature_close_to_greedy_is_greedy_and_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    assert defaults(tmp_path, do_sample=True, temperature=value).sampling == {"do_sample": True, "temperature": 0.0}
    (told,) = warnings(caplog)
    assert f"temperature = {value!r} is below 0.01: taken as 0, greedy" in told


@pytest.mark.parametrize("value", [0.0, 0.01, 0.6])
def test_temperatures_that_are_not_greedy_are_not_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: float
) -> None:
    assert defaults(tmp_path, temperature=value).sampling == {"temperature": value} and not warnings(caplog)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("temperature", -1.0, "0 to 100"),
        ("temperature", float("nan"), "0 to 100"),
        ("temperature", "hot", "0 to 100"),
        ("temperature", True, "0 to 100"),
        ("top_k", -2, "an integer, 0 to 2147483647"),
        ("top_k", 0.5, "an integer, 0 to 2147483647"),
        ("top_k", 1 << 40, "an integer, 0 to 2147483647"),
        ("top_k", 10**400, "an integer, 0 to 2147483647"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_p", 1e-50, "above 0 and at most 1"),
        ("min_p", -0.1, "0 to 1"),
        ("repetition_penalty", 0.0, "0.001 to 10"),
        ("max_new_tokens", 1 << 40, "an integer, 1 to 2147483647"),
        ("min_new_tokens", -1, "an integer, 0 to 2147483647"),
        ("eos_token_id", -1, "an integer, 0 to 100"),
        ("eos_token_id", [0, 101], "an integer, 0 to 100"),
        ("eos_token_id", "</s>", "an integer, 0 to 100"),
        ("do_sample", 0, "true or false"),
        ("do_sample", "false", "true or false"),
    ],
)
def test_generation_settings_out_of_range_are_rejected_by_name(
    tmp_path: Path, name: str, value: object, limit: str
) -> None:
    complaint = f"generation_config.json: {name} = {value!r}: must be {limit}"
    with pytest.raises(ModelRefusedError, match=re.escape(complaint)):
        defaults(tmp_path, **{name: value})


def test_more_end_ids_than_a_request_may_carry_are_refused(tmp_path: Path) -> None:
    assert len(defaults(tmp_path, eos_token_id=[*range(64)]).eos_token_ids) == 64
    with pytest.raises(ModelRefusedError, match=r"eos_token_id = \[0, 1, .*: must be at most 64 ids"):
        defaults(tmp_path, eos_token_id=[*range(65)])


@pytest.mark.parametrize("text", ["{", "[1]", '"x"'])
def test_an_invalid_generation_config_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelRefusedError, match=r"generation_config\.json"):
        generation_defaults(tmp_path, SimpleNamespace(config=LlamaConfig()), vocab_size=101)


def test_ignored_generation_settings_that_would_change_tokens_are_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="betoken")
    unused = {"no_repeat_ngram_size": 3, "begin_suppress_tokens": [220], "forced_bos_token_id": 0, "num_beams": 4}
    assert defaults(tmp_path, **unused, eta_cutoff=1e-3).sampling == {}
    (text,) = warnings(caplog)
    assert all(f"{name} = {value}" in text for name, value in {**unused, "eta_cutoff": 0.001}.items())


def test_generation_settings_without_effect_are_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="betoken")
    off = {"no_repeat_ngram_size": 0, "num_beams": 1, "typical_p": 1.0, "suppress_tokens": [], "sequence_bias": None}
    defaults(tmp_path, **off, min_length=0, eta_cutoff=0.0, token_healing=False, max_length=4096, pad_token_id=-1)
    assert not warnings(caplog)


def test_a_model_with_an_invalid_generation_config_is_rejected_at_load(tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, "llama")
    (tmp_path / "generation_config.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 101}))
    with pytest.raises(ModelRefusedError, match=r"config\.json: eos_token_id = 101: must be an integer, 0 to 100"):
        load_runner(EngineConfig(directory, compile="off", num_pages=8))
