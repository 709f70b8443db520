"""Facts of a model, taken before its layers are replaced: shapes of its KV, its own logits.

It knows the model's forward, not the ways to run it faster.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from betoken.engine.attention import CONTEXT_KEYWORD, ProbeContext
from betoken.engine.bring_up.passed_check import OtherLogitsError, PassedCheck
from betoken.engine.bring_up.self_check import eager_logits, sample_sequences
from betoken.engine.config import EngineConfig
from betoken.engine.errors import EngineError, ModelRefusedError
from betoken.engine.families.refusals import check_windows
from betoken.engine.families.replacement import replace_mixers
from betoken.engine.features import NO_FEATURES, Features
from betoken.engine.kv_pool import LayerShape
from betoken.engine.model_info import ModelInfo
from betoken.engine.ranks.layers import whole_layers
from betoken.engine.ranks.split import Split
from betoken.engine.ranks.stage_states import states_of_all
from betoken.engine.ranks.stages import stage_features
from betoken.engine.state_shapes import StateShape
from betoken.engine.weights.activations import exact_rows, rounds_rows
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.layers import lacks_numbers, zero_products

_READ_OF_OURS = re.compile(r"'(\w+)' object has no attribute '(\w+)'")
_OWN_FORWARD = 0.2
"""Fraction of loading at which the model's own forward runs."""
_OURS = (
    *("betoken.engine.cpu.row_linear", "betoken.engine.cuda.row_linear", "betoken.engine.reference.block_linear"),
    *("betoken.engine.ranks.layers", "betoken.engine.ranks.stages"),
)
"""Modules of the layers that take the place of a model's own."""


@dataclass(frozen=True, slots=True)
class Examined:
    """A loaded model and what the check at load compares it with."""

    model: Any
    info: ModelInfo
    shapes: dict[int, LayerShape]
    """Shapes of keys and values by layer, which the rank stores."""
    states: dict[int, StateShape]
    """States of layers in addition to the pages, which the rank stores."""
    all_states: dict[int, StateShape]
    """States of the layers of all pipeline stages."""
    sequences: list[list[int]]
    """Token ids of the sequences that the check runs."""
    expected: list[Tensor]
    """The model's own eager logits [n, V] of each sequence; empty without a check, or if it passed before."""
    is_mixture: bool
    """True if tokens are sent to experts."""
    check: PassedCheck
    """The check as it passed before, or passes now."""
    rounds_rows: bool = False
    """True if a layer rounds its inputs to int8; `expected` is of exact ones."""
    rounding: list[float] = field(default_factory=list)
    """Mean distance by which that moves the logits of each sequence, from the check."""
    features: Features = NO_FEATURES
    """Hidden states that forwards return."""


def examine(config: EngineConfig, model: Any, info: ModelInfo, progress: Progress) -> Examined:
    """Run the unchanged model unless its check passed before, then the model with our mixers; all ranks together.

    Raises:
        ModelRefusedError: the model cannot be run this way, or hides the windows of its layers.
        OtherLogitsError: the check did not pass before, and the model has packed weights only.
    """
    sequences = sample_sequences(info.vocab_size, info.max_context, config.max_num_batched_tokens)
    is_mixture = _any_rank(config, any(name.endswith("experts") for name, _ in model.named_modules()))
    features = _features(config, model)
    check = PassedCheck.of(config, info, features.layers)
    if not check.is_known and lacks_numbers(model):
        raise OtherLogitsError("the model was not checked with these settings")
    expected: list[Tensor] = []
    with refusing(model):
        if _any_rank(config, config.self_check and not check.is_known):
            progress("running the model's own forward", _OWN_FORWARD)
            with exact_rows(model), whole_layers(model):
                expected = eager_logits(model, sequences)
        replace_mixers(model)
        if config.ranks is not None and (config.ranks.num_stages == 1 or config.ranks.columns.size > 1):
            Split(config.ranks.columns).apply_to_rest(model)
    shapes, states = _probe(model, info.max_context, features)
    all_states = states if config.ranks is None else states_of_all(config.ranks, states)
    return Examined(
        model,
        info,
        shapes,
        states,
        all_states,
        sequences,
        expected,
        is_mixture,
        check,
        rounds_rows(model),
        features=features,
    )


def _any_rank(config: EngineConfig, value: bool) -> bool:
    """Whether this holds on a rank."""
    return value if config.ranks is None else not config.ranks.least(not value)


def _features(config: EngineConfig, model: Any) -> Features:
    """The hidden states that the options select: layers ascending, each once, from 0."""
    if config.feature_layers is None:
        return NO_FEATURES
    num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
    wanted = config.feature_layers(num_layers)
    for layer in wanted:
        if not -num_layers - 1 <= layer <= num_layers:
            raise ModelRefusedError(f"feature_layers: {layer} is outside [{-num_layers - 1}, {num_layers}]")
    layers = tuple(sorted({layer % (num_layers + 1) for layer in wanted}))
    if layers and config.ranks is not None and config.ranks.num_stages > 1:
        return stage_features(model, config.ranks, layers)
    return Features(layers)


@contextmanager
def refusing(model: Any) -> Iterator[None]:
    """Turn whatever the model's own code raises into a refusal that names its class."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        if isinstance(error, AttributeError) and (found := _READ_OF_OURS.search(str(error))):
            owns = {type(module).__name__ for module in model.modules() if type(module).__module__ in _OURS}
            if found[1] in owns:
                reason = f"its code reads the {found[2]} of linear layers itself, which are kept in another form here"
        raise ModelRefusedError(f"{type(model).__name__} cannot be run: {reason}") from error


@torch.inference_mode()
def _probe(
    model: Any, max_context: int, features: Features = NO_FEATURES
) -> tuple[dict[int, LayerShape], dict[int, StateShape]]:
    """Shapes of each layer's keys and values, and of its states, from one forward of two tokens with features."""
    context = ProbeContext()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    with refusing(model), zero_products(model):
        keywords = features.keywords() | {CONTEXT_KEYWORD: context}
        output = model(input_ids=ids, position_ids=positions, use_cache=False, **keywords)
    features.check(model, output)
    if not context.shapes and not context.states:
        raise ModelRefusedError(f"{type(model).__name__} has no layer that uses transformers' attention interface")
    with refusing(model):
        check_windows(model, context.windows, max_context)
    shapes = {layer: LayerShape(*shape) for layer, shape in context.shapes.items()}
    for layer in range(max([*shapes, *context.states]) + 1):
        shapes.setdefault(layer, LayerShape(1, 0, 0))  # layers are numbered without gaps
    return shapes, context.states
