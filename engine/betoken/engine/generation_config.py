"""A checkpoint's generation_config.json: default sampling parameters and EOS ids.

Its values are checked at load. A value that no request could send is refused with its file, field and limit.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
from transformers import GenerationConfig
from transformers.utils import CONFIG_NAME, GENERATION_CONFIG_NAME

from betoken.engine.errors import ModelRefusedError
from betoken.engine.sampling import (
    MAX_EOS_TOKEN_IDS,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
    MIN_TEMPERATURE,
)

_LOG = logging.getLogger(__name__)

_MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class _Range:
    """The range of a number."""

    lowest: float
    highest: float
    is_count: bool = False
    takes_lowest: bool = True

    def __str__(self) -> str:
        below = f"{self.lowest:g} to" if self.takes_lowest else f"above {self.lowest:g} and at most"
        kind = "an integer, " if self.is_count else ""
        return f"must be {kind}{below} {self.highest:.10g}"

    def holds(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return False
        if self.is_count and isinstance(value, float) and not value.is_integer():
            return False
        if not self.lowest <= value <= self.highest:
            return False
        return self.takes_lowest or float(np.float32(value)) > self.lowest  # requests hold float32


_RANGES = {
    "temperature": _Range(0, MAX_TEMPERATURE),
    "top_k": _Range(0, _MAX_COUNT, is_count=True),
    "top_p": _Range(0, 1, takes_lowest=False),
    "min_p": _Range(0, 1),
    "repetition_penalty": _Range(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    "max_new_tokens": _Range(1, _MAX_COUNT, is_count=True),
    "min_new_tokens": _Range(0, _MAX_COUNT, is_count=True),
}

_NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), 0),
    **dict.fromkeys(("typical_p", "encoder_repetition_penalty", "guidance_scale", "num_beams", "num_beam_groups"), 1),
    **dict.fromkeys(
        ("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "constraints", "force_words_ids"), []
    ),
    **dict.fromkeys(("sequence_bias", "watermarking_config"), {}),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **dict.fromkeys(("top_h", "dola_layers", "stop_strings"), None),
    "token_healing": False,
}
"""Settings with which `transformers` would choose other tokens and we do not follow, and the value that does nothing;
None does nothing in any of them."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """Sampling of requests that leave it out."""

    sampling: dict[str, Any]
    """Values that are set, among `do_sample` and the fields of `SamplingParams`."""
    eos_token_ids: tuple[int, ...]


def generation_defaults(directory: Path, model: Any, vocab_size: int) -> GenerationDefaults:
    """Read and check generation_config.json; without the file, the model's own generation config.

    `directory` may be a GGUF file.

    Raises:
        ModelRefusedError: the file cannot be read, or a value is outside its limits.
    """
    path, config = _read(directory, model)
    given = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    ignored = [f"{name} = {short(given[name])}" for name in _NEUTRAL if name in given and given[name] != _NEUTRAL[name]]
    if ignored:
        _LOG.warning("%s: ignored, though generate() would choose other tokens: %s", path, ", ".join(ignored))
    sampling = _sampling(path, given)
    eos = config.eos_token_id
    if eos is None:
        path, eos = _described_in(directory), getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    return GenerationDefaults(sampling, _eos_token_ids(path, eos, vocab_size))


def _read(directory: Path, model: Any) -> tuple[Path, GenerationConfig]:
    path = directory / GENERATION_CONFIG_NAME
    if not path.is_file():
        return _described_in(directory), model.generation_config
    try:
        return path, GenerationConfig.from_pretrained(directory)
    except Exception as error:  # whatever its contents make transformers raise
        raise ModelRefusedError(f"{path}: {error}") from error


def _described_in(source: Path) -> Path:
    """The file with a model's configuration: the GGUF file itself, or the directory's config.json."""
    return source if source.is_file() else source / CONFIG_NAME


def _sampling(path: Path, given: dict[str, Any]) -> dict[str, Any]:
    sampling = {name: given[name] for name in ("do_sample", *_RANGES) if name in given}
    if sampling.get("top_k") == -1:  # a common way to say all
        del sampling["top_k"]
    if not isinstance(sampling.get("do_sample", True), bool):
        raise ModelRefusedError(f"{path}: do_sample = {sampling['do_sample']!r}: must be true or false")
    for name, allowed in _RANGES.items():
        if name not in sampling:
            continue
        if not allowed.holds(sampling[name]):
            raise ModelRefusedError(f"{path}: {name} = {sampling[name]!r}: {allowed}")
        if allowed.is_count:
            sampling[name] = int(sampling[name])
    if 0 < (temperature := sampling.get("temperature", 0)) < MIN_TEMPERATURE:
        _LOG.warning("%s: temperature = %r is below %g: taken as 0, greedy", path, temperature, MIN_TEMPERATURE)
        sampling["temperature"] = 0.0
    return sampling


def _eos_token_ids(path: Path, given: Any, vocab_size: int) -> tuple[int, ...]:
    ids = () if given is None else given if isinstance(given, (list, tuple)) else (given,)
    allowed = _Range(0, vocab_size - 1, is_count=True)
    for token_id in ids:
        if not allowed.holds(token_id):
            raise ModelRefusedError(f"{path}: eos_token_id = {given!r}: {allowed}, an id of the vocabulary")
    if len(ids) > MAX_EOS_TOKEN_IDS:
        raise ModelRefusedError(f"{path}: eos_token_id = {short(given)}: must be at most {MAX_EOS_TOKEN_IDS} ids")
    return tuple(int(token_id) for token_id in ids)
