"""Load a checkpoint as an unmodified transformers model, and say what it is. It knows no pages or batches."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from betoken.common.gguf import GgufError
from betoken.engine.attention import ATTENTION_NAME, register_attention
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import family_of
from betoken.engine.families.frequencies import freeze_frequencies, rope_parameters, settle_frequencies
from betoken.engine.families.refusals import check_code, check_layers
from betoken.engine.generation_config import generation_defaults
from betoken.engine.model_info import ModelInfo
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.experts import use_grouped_experts
from betoken.engine.weights.language_model import check_whole, is_multimodal, media_token_ids, model_class_of
from betoken.engine.weights.layers import ExpertWeights, GroupedLinear, num_grouped, output_width
from betoken.engine.weights.mask_token import mask_token_of
from betoken.engine.weights.packed import FindPacked, use_packed
from betoken.engine.weights.plausible import check_sizes
from betoken.engine.weights.quantized import select_loading
from betoken.engine.weights.sources import Source, open_source
from betoken.engine.weights.stored import ModelSplit
from betoken.kernels.cpu.grouped import PackedGrouped

_LOG = logging.getLogger(__name__)

_DTYPES = ("bfloat16", "float16", "float32")
"""Element types with kernels and tolerances."""
_LENGTHS = ("max_position_embeddings", "max_seq_len", "seq_length")
"""Names of a model's longest text in its configuration."""
_JOINING_LAYERS = {
    "hidden_size_per_layer_input": "one table holds inputs of all layers",
    "num_kv_shared_layers": "the last layers read keys and values of earlier ones",
}
"""Fields of a configuration by which layers depend on their number, and how."""
_READ_FROM, _READ_UNTIL = 0.05, 0.2
"""Where in loading weights are read, as fractions."""


def load_model(
    config: EngineConfig, progress: Progress, split: ModelSplit | None = None, find_packed: FindPacked | None = None
) -> tuple[Any, ModelInfo]:
    """The model in eval mode on its device with our attention selected, and its description.

    Args:
        split: selects a part of the weights; None = the whole model.
        find_packed: finds packed weights to use instead of the checkpoint's; not with `split`.

    Raises:
        ModelRefusedError: with the reason.
    """
    _check_device(config.device)
    progress("finding the checkpoint", 0.0)
    source = open_source(config.model, config.revision, progress)
    has_tokenizer = config.ranks is None or config.ranks.rank == 0  # the rank that serves
    try:
        described = source.config_dict()
        check_type(described)
        check_sizes(described)
        model_config = source.config()
        text_config = model_config.get_text_config(decoder=True)
        check_layers(text_config)
        check_code(model_class_of(model_config), text_config.model_type)
        fingerprint = source.fingerprint()
        tokenizer_hash = source.tokenizer_hash() if has_tokenizer else ""
        max_context = _max_context(text_config, config.max_context)
        settle_frequencies(text_config, max_context, is_asked=config.max_context is not None)
    except ModelRefusedError:
        raise
    except GgufError as error:  # which names the file
        raise ModelRefusedError(str(error)) from error
    except Exception as error:  # whatever the files' contents make transformers raise, or are taken for
        raise ModelRefusedError(f"{config.model}: {type(error).__name__}: {error}") from error
    if config.num_layers is not None:
        _keep_first_layers(text_config, config.num_layers)
        fingerprint += f":{config.num_layers}"
    fingerprint += f":{config.quantize}" if config.quantize is not None else ""
    progress("loading weights", _READ_FROM)
    model = _load_weights(source, model_config, config, progress, split, find_packed and find_packed(fingerprint))
    num_parameters = sum(parameter.numel() for parameter in model.parameters()) + num_grouped(model)
    num_parameters += split.num_elsewhere(model) if split else 0
    vocab_size = output_width(model.get_output_embeddings())
    defaults = generation_defaults(source.path, model, vocab_size)
    info = ModelInfo(
        model_id=source.name,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=vocab_size,
        max_context=max_context,
        eos_token_ids=defaults.eos_token_ids,
        default_sampling=defaults.sampling,
        weights_fingerprint=fingerprint,
        tokenizer_hash=tokenizer_hash,
        num_parameters=num_parameters,
        tokenizer_text=source.tokenizer_text if has_tokenizer else str,
        path=source.path,
        media_token_ids=media_token_ids(described) if is_multimodal(described.get("model_type", "")) else (),
        mask_token_id=mask_token_of(described, vocab_size) if config.num_layers is None else None,
    )
    return model, info


def _check_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch built without CUDA
        raise ModelRefusedError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error


def check_type(config: dict[str, Any]) -> None:
    """Refuse a model that is code of its checkpoint, since transformers would ask the terminal whether to run it, and a
    model that writes no text. transformers names an unknown type itself.

    Raises:
        ModelRefusedError: it is one of these.
    """
    model_type: str = config.get("model_type", "")
    is_known = model_type in CONFIG_MAPPING
    if is_multimodal(model_type):
        return
    if is_known and CONFIG_MAPPING[model_type] in MODEL_FOR_CAUSAL_LM_MAPPING:
        check_whole(model_type, CONFIG_MAPPING[model_type])
        return
    if config.get("auto_map"):
        raise ModelRefusedError(
            f"model type {model_type!r} is code of the checkpoint's own (auto_map in config.json), which is not run"
        )
    if is_known:
        raise ModelRefusedError(f"model type {model_type!r} is not a causal language model of transformers")


def _keep_first_layers(text_config: Any, num_layers: int) -> None:
    """Describe a model of the first layers only: of what the checkpoint holds for the others nothing is then read."""
    num_all = text_config.num_hidden_layers
    if num_layers > num_all:
        raise ModelRefusedError(f"num_layers: {num_layers} is above the model's {num_all}")
    if num_layers < num_all and (joining := [name for name in _JOINING_LAYERS if getattr(text_config, name, None)]):
        name = joining[0]
        reason = f"{name} = {getattr(text_config, name)}: {_JOINING_LAYERS[name]}"
        raise ModelRefusedError(f"num_layers: {num_layers} of {num_all} layers do not work alone, {reason}")
    text_config.num_hidden_layers = num_layers
    kinds = getattr(text_config, "layer_types", None) or ()
    if len(kinds) > num_layers:  # some families make them of the number of layers
        text_config.layer_types = kinds[:num_layers]


def _load_weights(
    source: Source,
    model_config: Any,
    config: EngineConfig,
    progress: Progress,
    split: ModelSplit | None,
    packed: Mapping[str, PackedGrouped] | None,
) -> Any:
    family = family_of(model_config.model_type)
    register_attention()
    disable_progress_bar()  # type: ignore[no-untyped-call]  # standard error is the log
    keywords: dict[str, Any] = {
        "dtype": config.dtype if config.dtype == "auto" else getattr(torch, config.dtype),
        "attn_implementation": "eager" if family.is_loaded_eagerly else ATTENTION_NAME,
        "output_loading_info": True,
    }
    narrow = use_packed(packed) if packed else None if split is None else split.narrow
    try:
        tell = partial(_log_progress, config, progress)
        select_loading(model_config, config, source.path, tell)
        with _quiet_about_other_layers(config.num_layers is not None):
            model, report = source.load(model_config, keywords, tell, narrow)
    except ModelRefusedError:
        raise
    except Exception as error:  # the model's own code may raise anything
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):  # looked up in the model's own table
            reason = "its code does not use the attention interface of transformers"
        raise ModelRefusedError(f"{config.model} cannot be loaded: {reason}") from error
    computed = (
        family.computed_buffers(model) if config.num_layers is None else set()
    )  # they follow from the number of layers
    _check_weights(config.model, model, report, computed)
    if (stored := str(model.dtype).removeprefix("torch.")) not in _DTYPES:
        raise ModelRefusedError(f"dtype: {config.model} is stored in {stored}: set one of {', '.join(_DTYPES)}")
    if model.get_output_embeddings() is None:
        raise ModelRefusedError(f"{type(model).__name__} has no output embedding")
    if model._can_set_experts_implementation():
        # The experts' default multiplies the rows that share an expert together: a row's bits would depend on them.
        if split is not None or any(isinstance(module, ExpertWeights) for module in model.modules()):
            use_grouped_experts(model)
        else:
            model.set_experts_implementation("batched_mm")
    freeze_frequencies(model)
    family.restore_buffers(model)
    if split is not None:
        split.apply(model)
    return model.to(config.device).eval().requires_grad_(False)


def _log_progress(config: EngineConfig, progress: Progress, fraction: float) -> None:
    """Progress through the weights that are read one by one, of loading as a whole."""
    stage = "loading weights" if config.quantize is None else f"rounding weights to {config.quantize}"
    progress(stage, _READ_FROM + (_READ_UNTIL - _READ_FROM) * fraction)


def _check_weights(name: str, model: Any, report: dict[str, Any], computed: set[str]) -> None:
    """Refuse what transformers only warns of: weights it made up, and weights of linear layers it left aside.

    The latter are biases that config.json denies, or the scales of a quantization unknown to transformers, which then
    takes the quantized numbers for the weights themselves.

    Args:
        computed: names of buffers that transformers computes.
    """
    if missing := sorted(set(report["missing_keys"]) - computed):
        raise ModelRefusedError(f"{name} lacks {len(missing)} of the model's weights, as {missing[0]}")
    linears = {path for path, module in model.named_modules() if isinstance(module, (nn.Linear, Conv1D, GroupedLinear))}
    if unused := sorted(key for key in report["unexpected_keys"] if key.rpartition(".")[0] in linears):
        raise ModelRefusedError(
            f"{name} holds {len(unused)} tensors that the model's linear layers do not use, as {unused[0]}: is it"
            " quantized?"
        )


@contextmanager
def _quiet_about_other_layers(is_quiet: bool) -> Iterator[None]:
    """transformers reports the weights it leaves alone, at length."""
    logger = logging.getLogger("transformers")
    level = logger.level
    if is_quiet:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _max_context(text_config: Any, asked: int | None) -> int:
    own: int | None = next((getattr(text_config, name) for name in _LENGTHS if hasattr(text_config, name)), None)
    own = None if own is not None and own < 1 else own  # -1: unlimited
    if own is None and asked is None:
        raise ModelRefusedError("the model names no max_position_embeddings: set max_context")
    if own is not None:
        own = max([own, *_yarn_lengths(text_config, own)])
    if own is not None and asked is not None and asked > own:
        raise ModelRefusedError(f"max_context: {asked} is above the model's own {own}")
    return int(own if asked is None else asked)  # type: ignore[arg-type]


def _yarn_lengths(text_config: Any, own: int) -> Iterator[int]:
    """Factor by which YaRN stretches positions. Whoever adds it to a checkpoint, as Qwen advises for long texts, leaves
    the length as it was."""
    for rope in rope_parameters(text_config):
        if rope.get("rope_type", rope.get("type")) == "yarn" and rope.get("factor") is not None:
            yield int(rope["factor"] * rope.get("original_max_position_embeddings", own))
