"""The configuration of a model from the metadata of its GGUF file.

It reads keys, and the few numbers of tensors that turn positions; a key that nothing reads is refused, for the model
would be another.
"""

import logging
from collections.abc import Mapping
from typing import Any, cast

from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

from betoken.common.gguf import GgufError, GgufHeader, end_tokens
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import ARCHITECTURES
from betoken.engine.families.family import Architecture, Given
from betoken.engine.families.frequencies import rope_parameters
from betoken.engine.weights.gguf.rope import rope_scaling
from betoken.engine.weights.plausible import check_sizes

_LOG = logging.getLogger(__name__)

_TOKEN_IDS = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
_TOKENS = "tokenizer.ggml.tokens"
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "pooling_type", "nextn_predict_layers"), (0,)),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
"""Keys that nothing reads, and the values that change nothing."""
_DESCRIPTIVE = frozenset({"vocab_size", "tensor_data_layout"})
"""Keys that say nothing that the tensors would not."""


def read_config(header: GgufHeader) -> PreTrainedConfig:
    """The model's configuration, with the end ids of the file: what transformers makes of it and what its tables leave
    out, without its reader, which takes seconds for a vocabulary.

    Raises:
        ModelRefusedError: the architecture is not supported, or the file says what nothing reads.
    """
    path, name = header.path, header.architecture
    if name not in ARCHITECTURES:
        served = ", ".join(sorted(ARCHITECTURES))
        raise ModelRefusedError(f"{path}: general.architecture = {name!r} is none of {served}")
    architecture = ARCHITECTURES[name]
    keys = _Keys(header)
    try:
        given = _by_table(keys, architecture) if architecture.table else _by_function(keys)
        check_sizes(given)  # before a configuration makes a list as long as its number of layers
        config: PreTrainedConfig = CONFIG_MAPPING[given.pop("model_type")].from_dict(given)
        keys.check_rest(config)
        ends = end_tokens(header)
    except GgufError as error:  # names the file
        raise ModelRefusedError(str(error)) from error
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{path}: {error}") from error
    except Exception as error:  # whatever transformers makes of the values
        raise ModelRefusedError(f"{path}: {type(error).__name__}: {error}") from error
    _LOG.info("%s: end tokens: %s", path, ", ".join(f"{token_id} ({of})" for token_id, of in ends.items()) or "none")
    config.eos_token_id = [*ends] or None
    return config


class _Keys:
    """The metadata below an architecture's name, and which of it was read."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        start = f"{header.architecture}."
        self.values = {
            key.removeprefix(start): value for key, value in header.metadata.items() if key.startswith(start)
        }
        self._read: set[str] = set()

    def get(self, name: str) -> Any:
        """The value, None if the file lacks it."""
        self._read.add(name)
        return self.values.get(name)

    def check_rest(self, config: PreTrainedConfig) -> None:
        """Raises:
        ModelRefusedError: a value that nothing read and that says something else than the configuration.
        """
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        same: dict[str, tuple[Any, ...]] = {
            **dict.fromkeys(("attention.key_length", "attention.value_length"), (head_size,)),
            "rope.dimension_count": (_rotary_size(config, head_size),),
            "expert_gating_func": (ARCHITECTURES[self.header.architecture].expert_gate,),
        }
        for name, value in self.values.items():
            if name in self._read and name not in same:
                continue
            if name in _DESCRIPTIVE or value in (*_NEUTRAL.get(name, ()), *same.get(name, ())):
                continue
            raise ModelRefusedError(
                f"{self.header.architecture}.{name} = {value!r} is not read: the model would be another"
            )


def _by_table(keys: _Keys, architecture: Architecture) -> Given:
    header, table_name = keys.header, cast(str, architecture.table)
    table: Mapping[str, str | None] = cast(Any, GGUF_CONFIG_MAPPING)[table_name]
    given: Given = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(table_name, {})) | {"model_type": architecture.model_type}
    given["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in header.tensors)
    given["vocab_size"] = len(header.metadata.get(_TOKENS) or ())
    for field, key in _TOKEN_IDS.items():
        given[field] = header.metadata.get(f"tokenizer.ggml.{key}")
    for name, read in {**table, **architecture.more}.items():
        value = keys.get(name) if read is not None else None
        if isinstance(value, list):
            raise ModelRefusedError(f"{header.architecture}.{name}: a list, one value for each layer, is not supported")
        if value is not None:
            given[cast(str, read)] = value
    if (scaling := rope_scaling(header, architecture.rope_tensors, keys.get)) is not None:
        given["rope_scaling"] = scaling
    architecture.finish(given)
    return given


def _by_function(keys: _Keys) -> Given:
    header = keys.header
    metadata = _Recording(header.metadata, keys)
    given: Given = GGUF_CONFIG_ARCHS[header.architecture](metadata, tuple(tensor.name for tensor in header.tensors))
    return given


class _Recording(dict[str, Any]):
    """The metadata in transformers' form, the vocabulary as its length; records which keys are read."""

    def __init__(self, metadata: Mapping[str, Any], keys: _Keys) -> None:
        super().__init__(metadata)
        self[_TOKENS] = len(metadata.get(_TOKENS) or ())
        self._keys, self._start = keys, f"{keys.header.architecture}."

    def __getitem__(self, key: str) -> Any:
        self._keys.get(key.removeprefix(self._start))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default


def _rotary_size(config: PreTrainedConfig, head_size: int) -> int:
    """Numbers of a head that positions turn."""
    rope = next(rope_parameters(config), {})
    return int(head_size * rope.get("partial_rotary_factor", 1.0))
