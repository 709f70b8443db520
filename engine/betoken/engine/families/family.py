"""The record of a model family: what the engine does for it beyond what every model of transformers gets.

A family's file holds its record and its code. The records are found through `betoken.engine.families`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from betoken.engine.attention import ATTENTION_NAME
from betoken.engine.mixers import MakeMixer
from betoken.engine.mixers.recurrences import BindRecurrence

Given = dict[str, Any]
"""Fields of a configuration, as they are read."""
Bind = Callable[[Any], None]
"""Changes a module of transformers in place."""


def _unchanged(given: Any) -> None:
    """Change nothing."""


def _no_fault(config: Any) -> None:
    """Find nothing to refuse."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How GGUF files of one `general.architecture` become a configuration.

    transformers' tables come first. This adds the keys that llama.cpp writes and those tables leave out.
    """

    model_type: str
    """The model type of transformers."""
    table: str | None = None
    """Name of its table in `GGUF_CONFIG_MAPPING`; None if transformers makes the configuration by a function."""
    more: Mapping[str, str] = field(default_factory=dict)
    """Fields of the configuration by the keys, below the architecture's, that the table leaves out."""
    finish: Callable[[Given], None] = _unchanged
    """Sets fields that follow from others."""
    rope_tensors: tuple[str, ...] = ()
    """Names of tensors that hold a factor of every frequency."""
    expert_gate: int | None = None
    """How routers turn scores into weights, `expert_gating_func`: 1 softmax, 2 sigmoid."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model family, or several that need the same."""

    model_types: tuple[str, ...] = ()
    """Model types of causal language models."""
    multimodal: tuple[str, ...] = ()
    """Types of multimodal models whose text is served: one `lm_head` over one language model, causal on text."""
    refusal: str = ""
    """Why neither type is served; empty for a family that is."""
    find_fault: Callable[[Any], str | None] = _no_fault
    """Text configuration -> the setting that is not supported, and why; None for none."""
    layer_types: frozenset[str] = frozenset()
    """Types of its layers that mix tokens other than by full or sliding attention."""
    mixers: Mapping[str, MakeMixer] = field(default_factory=dict)
    """Class of a layer of transformers -> the mixer that replaces it."""
    unnumbered: Mapping[str, str] = field(default_factory=dict)
    """Class of a layer -> path of the mixer in it that lacks the layer's number."""
    recurrences: Mapping[str, BindRecurrence] = field(default_factory=dict)
    """Function of transformers that computes a recurrence -> ours."""
    bindings: Mapping[str, Bind] = field(default_factory=dict)
    """Class of transformers -> the change that makes its code run with a context."""
    has_own_attention: bool = False
    """Whether `bindings` replace attention that does not use transformers' interface; it states windows and spans."""
    is_loaded_eagerly: bool = False
    """Whether its layers accept the names of transformers' own attention alone."""
    finish: Bind = _unchanged
    """Changes the whole model after its layers."""
    computed_buffers: Callable[[nn.Module], set[str]] = lambda model: set()
    """Names of buffers that a checkpoint may lack, since transformers computes them."""
    restore_buffers: Bind = _unchanged
    """Computes buffers of a loaded model that the checkpoint stores rounded."""
    take_long_factors: Callable[[dict[str, Any]], None] = lambda rope: rope.update(short_factor=rope["long_factor"])
    """Makes a LongRoPE description use the factors of long texts for all texts."""
    converted_as: Mapping[str, str] = field(default_factory=dict)
    """Model type -> type under which transformers keeps the conversions of its stored weights."""
    towers: tuple[str, ...] = ()
    """Prefixes of tensors of towers in checkpoints whose language model is named `model`."""
    gguf: Mapping[str, Architecture] = field(default_factory=dict)
    """GGUF architectures by `general.architecture`."""
    draft_tensors: str = ""
    """Regular expression of the tensors that predict further tokens (MTP), which the model itself does not use."""


def skip_mask(model: Any) -> None:
    """Name our attention in a model that is loaded eagerly, so that it makes no mask."""
    model.config._attn_implementation_internal = ATTENTION_NAME
