"""A GGUF file as a model: its configuration through transformers' tables, its weights in their own blocks.

It knows how transformers names a file's keys and tensors; whatever those tables leave out is refused, not ignored.
"""

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor
from transformers.pytorch_utils import Conv1D

from betoken.common.gguf import GgufHeader, GgufTensor
from betoken.engine.errors import ModelRefusedError
from betoken.engine.weights.fingerprint import SAMPLE_BYTES
from betoken.engine.weights.gguf_blocks import GROUPED_TYPES, read_blocks
from betoken.engine.weights.plausible import check_sizes
from betoken.engine.weights.stored import StoredConfig, StoredWeight, load_beside

ARCHITECTURES: Mapping[str, str] = {
    name: name for name in ("gemma2", "gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "starcoder2")
}
"""The supported architectures: the model type of each."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("expert_count", "expert_used_count", "pooling_type"), (0,)),
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (0.0, 1.0),
    "attention.causal": (True,),
    "use_parallel_residual": (False,),
}
"""Keys below the architecture's that transformers does not read, and the values that change nothing."""
_DESCRIPTIVE = frozenset({"vocab_size", "tensor_data_layout", "rope.dimension_count"})
_HEAD_SIZES = ("attention.key_length", "attention.value_length")
_TOKEN_IDS = ("bos_token_id", "pad_token_id")
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_DENSE_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_config(header: GgufHeader) -> PreTrainedConfig:
    """The model's configuration, with the end ids of the file: what transformers makes of it, without its reader, which
    takes seconds for a vocabulary.

    Raises:
        ModelRefusedError: the architecture is not supported, or the file says what transformers does not read.
    """
    path, architecture = header.path, header.architecture
    if architecture not in ARCHITECTURES:
        raise ModelRefusedError(
            f"{path}: general.architecture = {architecture!r} is none of {', '.join(sorted(ARCHITECTURES))}"
        )
    table: Mapping[str, str | None] = cast(Any, GGUF_CONFIG_MAPPING)[architecture]
    given: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(architecture, {}))
    given["tie_word_embeddings"] = all(tensor.name != "output.weight" for tensor in header.tensors)
    given["vocab_size"] = len(header.metadata.get("tokenizer.ggml.tokens") or ())
    for key in _TOKEN_IDS:
        given[key] = header.metadata.get(f"tokenizer.ggml.{key.replace('pad', 'padding')}")
    unread = {}
    for key, value in header.metadata.items():
        name = key.removeprefix(f"{architecture}.")
        if name == key or name in _DESCRIPTIVE or value in _NEUTRAL.get(name, ()):
            continue
        if name not in table:
            unread[name] = value
        elif (field := table[name]) is not None:
            given[field] = value
    try:
        check_sizes(given)  # before a configuration makes a list as long as its number of layers
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{path}, as {error}") from error
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[ARCHITECTURES[architecture]].from_dict(given)
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    except Exception as error:  # whatever transformers makes of the values
        raise ModelRefusedError(f"{path}: {type(error).__name__}: {error}") from error
    for name, value in unread.items():
        if name not in _HEAD_SIZES or value != head_size:
            raise ModelRefusedError(
                f"{path}: {architecture}.{name} = {value!r} is not read by transformers: the model would be another"
            )
    ids = [header.metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS]
    config.eos_token_id = sorted({token_id for token_id in ids if token_id is not None}) or None
    return config


def hash_header(header: GgufHeader) -> str:
    """SHA-256 hex of a file's header and of 4 KiB from the start, middle and end of each tensor."""
    digest = hashlib.sha256()
    with header.path.open("rb") as file:
        digest.update(file.read(header.num_bytes))
        for tensor in header.tensors:
            for place in (0, tensor.num_bytes // 2, max(0, tensor.num_bytes - SAMPLE_BYTES)):
                file.seek(tensor.start + place)
                digest.update(file.read(min(SAMPLE_BYTES, tensor.num_bytes - place)))
    return digest.hexdigest()


def load(
    header: GgufHeader, config: PreTrainedConfig, keywords: dict[str, Any], progress: Callable[[float], None]
) -> tuple[Any, dict[str, Any]]:
    """The model and transformers' report of what it lacks; `keywords` are those of `from_pretrained`, `progress` gets
    the fraction of weights read so far.

    Raises:
        ModelRefusedError: a tensor's place or shape in the model is unknown.
    """
    state: dict[str, _Lazy] = {}

    def plan(model: Any) -> dict[str, StoredWeight]:
        names = _Names(header, config, model)
        state.update((name, _Lazy(names, tensor)) for name, tensor in names.tensors.items())
        return names.plan(model)

    if keywords.get("dtype") == "auto":
        keywords = keywords | {"dtype": _dtype_of(header)}
    config.quantization_config = StoredConfig(plan, progress)
    return load_beside(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, state, keywords)


def _dtype_of(header: GgufHeader) -> torch.dtype:
    """Dtype of a file without quantised tensors, norms apart; bfloat16 for others."""
    types = {tensor.type for tensor in header.tensors if len(tensor.shape) > 1}
    return _DENSE_TYPES[types.pop()] if len(types) == 1 and types <= set(_DENSE_TYPES) else torch.bfloat16


def _names_in_file(model: Any, architecture: str, num_layers: int) -> dict[str, str]:
    """The names of a model's tensors by those that llama.cpp gives them."""
    number = next(key for key, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(number, num_layers)
    found = {}
    for name in model.state_dict():
        stem, dot, suffix = name.rpartition(".")
        if (known := names.get_name(stem)) is not None:
            found[known + dot + suffix] = name
    return found


def _processor_of(architecture: str) -> Any:
    return TENSOR_PROCESSORS.get(architecture, TensorProcessor)


class _Names:
    """Places of a file's tensors in a model."""

    def __init__(self, header: GgufHeader, config: PreTrainedConfig, model: Any) -> None:
        self.header = header
        self.processor: Any = _processor_of(header.architecture)(config=config.to_dict())
        known = _names_in_file(model, header.architecture, config.num_hidden_layers)
        num_layers = header.metadata.get(f"{header.architecture}.block_count")
        left_out = tuple(f"blk.{layer}." for layer in range(config.num_hidden_layers, num_layers or 0))
        self.tensors = {}
        for tensor in header.tensors:
            if tensor.name in known:
                self.tensors[known[tensor.name]] = tensor
            elif not tensor.name.startswith(left_out):
                raise ModelRefusedError(
                    f"{header.path}: tensor {tensor.name!r} has no place in {type(model).__name__} as transformers"
                    " reads it"
                )

    def plan(self, model: Any) -> dict[str, StoredWeight]:
        """The form that loading asks for (`stored.Plan`)."""
        plan = {}
        for name, tensor in self.tensors.items():
            if tensor.type in GROUPED_TYPES:
                plan[name.removesuffix(".weight")] = self._stored(model, name, tensor)
        for target, source in (getattr(model, "_tied_weights_keys", None) or {}).items():
            if (
                source.removesuffix(".weight") in plan
                and target not in self.tensors
                and model.config.tie_word_embeddings
            ):
                plan[target.removesuffix(".weight")] = plan[source.removesuffix(".weight")]
        return plan

    def _stored(self, model: Any, name: str, tensor: GgufTensor) -> StoredWeight:
        path = name.removesuffix(".weight")
        layer = model.get_submodule(path) if path != name else None
        if not isinstance(layer, (nn.Linear, nn.Embedding, Conv1D)) or len(tensor.shape) != 2:
            raise ModelRefusedError(
                f"{self.header.path}: tensor {tensor.name!r}, {tensor.type} {list(tensor.shape)}, is neither a linear"
                " layer nor an embedding: experts of mixtures are not supported in GGUF files"
            )
        expected = tuple(layer.weight.shape[::-1] if isinstance(layer, Conv1D) else layer.weight.shape)
        if tensor.shape != expected:
            raise ModelRefusedError(
                f"{self.header.path}: tensor {tensor.name!r} has shape {list(tensor.shape)}, not {list(expected)}"
            )
        shape = (tensor.shape[0], tensor.row_bytes)
        read, lazy = partial(_read, self.header, tensor), _Lazy(self, tensor)
        return StoredWeight({"weight": (shape, torch.uint8)}, read, fetch=lambda part: lazy[...], keys=(name,))

    def rows(self, tensor: GgufTensor) -> Tensor | None:
        """The order in which transformers takes a tensor's rows; None for tensors kept as they are.

        Raises:
            ModelRefusedError: it moves more than rows.
        """
        num_rows = tensor.shape[0]
        places = np.arange(num_rows, dtype=np.int64)[:, None].repeat(2, axis=1)
        try:
            taken = self.processor.process(weights=places, name=tensor.name).weights
        except Exception as error:  # it may count on the shape of the numbers
            raise self._moved(tensor) from error
        if np.array_equal(taken, places) or np.array_equal(taken, places.T):  # the latter of Conv1D
            return None
        if taken.shape != places.shape or not np.array_equal(np.sort(taken[:, 0]), places[:, 0]):
            raise self._moved(tensor)
        return torch.from_numpy(np.ascontiguousarray(taken[:, 0]))

    def _moved(self, tensor: GgufTensor) -> ModelRefusedError:
        return ModelRefusedError(
            f"{self.header.path}: tensor {tensor.name!r} of architecture {self.header.architecture!r} is not stored row"
            " by row as the model has it"
        )


def _read(header: GgufHeader, tensor: GgufTensor, tensors: Mapping[str, Tensor]) -> Any:
    try:
        return read_blocks(tensor.type, tensors["weight"], tensor.shape[-1], tensor.name)
    except ModelRefusedError as error:
        raise ModelRefusedError(f"{header.path}: {error}") from error


class _Lazy:
    """A tensor of the file, read when transformers asks for it."""

    def __init__(self, names: _Names, tensor: GgufTensor) -> None:
        self._names, self._tensor = names, tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of what is read."""
        is_grouped = self._tensor.type in GROUPED_TYPES
        return (self._tensor.shape[0], self._tensor.row_bytes) if is_grouped else self._tensor.shape

    def get_dtype(self) -> str:
        """The name by safetensors' convention."""
        return "U8" if self._tensor.type in GROUPED_TYPES else self._tensor.type

    def __getitem__(self, _: Any) -> Tensor:
        data = torch.from_numpy(
            np.fromfile(self._names.header.path, np.uint8, self._tensor.num_bytes, offset=self._tensor.start)
        )
        if self._tensor.type in GROUPED_TYPES:
            blocks = data.reshape(self.shape)
            order = self._names.rows(self._tensor)
            return blocks if order is None else blocks[order]
        numbers = data.view(_DENSE_TYPES[self._tensor.type]).reshape(self._tensor.shape)
        processed = self._names.processor.process(weights=numbers.float().numpy(), name=self._tensor.name).weights
        return torch.from_numpy(np.ascontiguousarray(processed))
