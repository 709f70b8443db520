"""The language model within a multimodal checkpoint: its configuration, its class, and its tensors among all.

It knows names alone; `families` knows the types. Towers for images, sound and video are neither made nor read.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, GenerationMixin, PreTrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.modeling_outputs import CausalLMOutputWithPast

from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import REFUSED_MULTIMODAL, SERVED_MULTIMODAL, TOWERS, family_of

_PARTS = frozenset(
    {"text_config", "vision_config", "audio_config", "vq_config", "audio_encoder", "audio_encoder_config"}
)
"""Names of the parts of a multimodal model's configuration."""
_SHARED_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MEDIA_TOKEN = re.compile(r"(image|video|audio|vision|img|media)_(pad_|placeholder_)?token_(id|index)")
_LANGUAGE_MODEL = re.compile(r"(model\.)?(language_model|text_model)\.")

Entry = TypeVar("Entry")


def is_multimodal(model_type: str) -> bool:
    """Whether the text of models of a type is served, as a part of them.

    Raises:
        ModelRefusedError: it is known to be impossible.
    """
    if reason := REFUSED_MULTIMODAL.get(model_type):
        raise ModelRefusedError(f"model type {model_type!r}: not even its text is served: {reason}")
    return model_type in SERVED_MULTIMODAL and model_type in CONFIG_MAPPING


def check_whole(model_type: str, config_class: Any) -> None:
    """Refuse a part of another model, which transformers counts among causal language models.

    Raises:
        ModelRefusedError: with the reason.
    """
    if getattr(config_class, "is_encoder_decoder", False) is True:
        raise ModelRefusedError(f"model type {model_type!r} is the decoder of a model with an encoder")
    if _PARTS & set(getattr(config_class, "sub_configs", ())):
        raise ModelRefusedError(
            f"model type {model_type!r} is multimodal, and the location of its text model is unknown"
        )


def language_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration of the model that is served: of a multimodal one the text's, with settings of the outer one."""
    if config.model_type not in SERVED_MULTIMODAL or (text := config.get_text_config(decoder=True)) is config:
        return config
    if hasattr(config, "tie_word_embeddings"):  # the class of the whole reads this one
        text.tie_word_embeddings = bool(config.tie_word_embeddings)
    text.architectures = [model_class_of(text).__name__]
    for field in _SHARED_FIELDS:
        if getattr(text, field, None) is None:
            setattr(text, field, getattr(config, field, None))
    if getattr(text, "dtype", None) is None:
        text.dtype = config.dtype
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        text.quantization_config = quantization
    return text


def media_token_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Ids that stand for pieces of images, sound or video in a prompt, ascending.

    Args:
        config: the content of config.json.
    """
    found = {value for name, value in config.items() if _MEDIA_TOKEN.fullmatch(name) and type(value) is int}
    return tuple(sorted(found))


def language_tensors(tensors: Mapping[str, Entry]) -> dict[str, Entry]:
    """Tensors of the language model by its own names; all of them if the checkpoint holds nothing else.

    Published files call it `language_model.model`, `model.language_model`, or, next to `visual`, simply `model`.
    """
    if not any(_LANGUAGE_MODEL.match(name) for name in tensors):
        return {name: entry for name, entry in tensors.items() if not name.startswith(TOWERS)}
    return {own: entry for name, entry in tensors.items() if (own := _own_name(name)) is not None}


def draft_tensors(tensors: Mapping[str, Entry], model_type: str) -> dict[str, Entry]:
    """Return the tensors of layers that predict further tokens (MTP), which drafters read and the model does not use.

    Args:
        model_type: of the language model.
    """
    pattern = family_of(model_type).draft_tensors
    return {name: entry for name, entry in tensors.items() if pattern and re.fullmatch(pattern, name)}


def _own_name(name: str) -> str | None:
    if found := _LANGUAGE_MODEL.match(name):
        rest = name[found.end() :]
        return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name if name.startswith("lm_head.") else None


def model_class_of(config: PreTrainedConfig) -> Any:
    """The class of transformers that a configuration's type selects, or a custom one around its layers."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        return found[0] if isinstance(found, tuple) else found
    return _with_head(MODEL_MAPPING[type(config)])


_made: dict[Any, Any] = {}


def _with_head(layers: Any) -> Any:
    """A causal language model of a class of layers for which transformers has none."""
    if layers not in _made:
        base = next(parent for parent in layers.__mro__[1:] if parent.__name__.endswith("PreTrainedModel"))
        name = f"{layers.__name__}WithHead"
        methods = {
            "__init__": _make_init(layers),
            "__module__": layers.__module__,
            "_tied_weights_keys": {"lm_head.weight": "model.embed_tokens.weight"},
            "base_model_prefix": "model",
            "config_class": layers.config_class,
            "forward": _forward,
        }
        found: Any = type(name, (base, GenerationMixin), methods)
        model_type = layers.config_class.model_type
        kept = family_of(model_type).converted_as.get(model_type)
        if kept is not None:
            mapping: Any = get_checkpoint_conversion_mapping(kept)  # type: ignore[no-untyped-call]
            register_checkpoint_conversion_mapping(name, mapping)
        setattr(sys.modules[layers.__module__], name, found)
        _made[layers] = found
    return _made[layers]


def _make_init(layers: Any) -> Any:
    def __init__(self: Any, config: PreTrainedConfig) -> None:  # noqa: N807
        super(_made[layers], self).__init__(config)
        self.model = layers(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    return __init__


def _forward(self: Any, input_ids: Tensor, logits_to_keep: int | Tensor = 0, **keywords: Any) -> CausalLMOutputWithPast:
    """As the causal language models of transformers."""
    output = self.model(input_ids=input_ids, **keywords)
    kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
    logits = self.lm_head(output.last_hidden_state[:, kept])
    return CausalLMOutputWithPast(
        logits=logits, past_key_values=output.past_key_values, hidden_states=output.hidden_states
    )
