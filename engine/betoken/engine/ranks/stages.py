"""Leaves a pipeline stage its layers of a model. Modules of other stages are replaced by modules without weights.

The model's own code runs on every stage: a layer before the stage's first returns the hidden states of the previous
stage, the layer after its last sends the stage's hidden states on. Only the last stage computes logits.
"""

import dis
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.custom_operator import define_operator
from betoken.engine.decoder_layers import find_decoder_layers
from betoken.engine.errors import ModelRefusedError
from betoken.engine.mixers.rebinding import own_forward
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.split import Split
from betoken.engine.ranks.stage_features import StageFeatures
from betoken.engine.weights.layers import output_width
from betoken.engine.weights.stored import Stored
from betoken.engine.weights.stored_files import Places

_INPUTS = frozenset(
    {
        *("attention_mask", "mamba_attention_mask", "causal_mask", "head_mask", "alibi", "position_bias"),
        *("position_ids", "position_embeddings", "cache_position", "cache_params", "past_key_values", "layer_past"),
        *("use_cache", "output_attentions", "output_router_logits", "kwargs"),
        *("encoder_hidden_states", "encoder_attention_mask"),  # None without an encoder
    }
)
"""Arguments of layers, besides hidden states, that every stage makes for itself."""
_JOINING = ("num_kv_shared_layers", "hidden_size_per_layer_input")
"""Fields of a configuration by which layers read more than the hidden states of the layer before."""


def stage_layers(group: RankGroup, num_layers: int) -> range:
    """Return the layers of the rank's stage; see `layers_of_stage`."""
    return layers_of_stage(group.stage, group.num_stages, num_layers)


def layers_of_stage(stage: int, num_stages: int, num_layers: int) -> range:
    """Return the layers of a stage. Earlier stages have one more if the number is uneven.

    Raises:
        ModelRefusedError: there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ModelRefusedError(f"pipeline: {num_stages} is above {num_layers}, the number of the model's layers")
    first, stop = (-(-num_layers * each // num_stages) for each in (stage, stage + 1))
    return range(first, stop)


def stage_features(model: Any, group: RankGroup, layers: tuple[int, ...]) -> StageFeatures:
    """Let all forwards of a stage exchange hidden states of these layers; all ranks together."""
    found = find_decoder_layers(model)
    assert found is not None, "stages have layers"
    modules = found[1]
    own = stage_layers(group, len(modules))
    features = StageFeatures(layers, own, len(modules))
    features.listen(model.get_decoder(), modules)
    for module in modules:
        if isinstance(module, OtherLayer):
            module.features = features
    return features


class OtherLayer(nn.Module):
    """A layer of another stage: returns its input, the previous stage's result, or its input after sending it on."""

    def __init__(self, layer: nn.Module, exchange: str, group: RankGroup) -> None:
        """`exchange`: `receive`, `send`, or nothing."""
        super().__init__()
        for name, value in vars(layer).items():  # which the model's code may read
            if isinstance(value, (bool, int, float, str)) and not name.startswith("_"):
                setattr(self, name, value)
        for name, child in layer.named_children():  # whose computed buffers it may fill
            self.add_module(name, _buffers_of(child))
        self._exchange, self._group = exchange, group
        self.features = StageFeatures((), range(0), 0)
        """Hidden states that the stage exchanges in addition to its result."""
        self._returns_tuple = _returns_tuple(layer)

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Hidden states [1, R, H] first, as the layer takes them; returns its kind of result."""
        x: Tensor = arguments[0] if arguments else next(iter(keywords.values()))
        if self._exchange:
            if x.dim() != 3:
                raise ModelRefusedError(f"pipeline: layers exchange hidden states of {x.dim()} dimensions, not of 3")
            x = self._receive(x) if self._exchange == "receive" else self._send(x)
        return (x, None) if self._returns_tuple else x

    def _receive(self, x: Tensor) -> Tensor:
        received = torch.ops.betoken_stages.receive(x, self._group.number, self.features.num_received)
        return self.features.unpack(received)

    def _send(self, x: Tensor) -> Tensor:
        sent: Tensor = torch.ops.betoken_stages.send(self.features.pack(x), self._group.number)
        return sent[:1]


class OtherEmbedding(nn.Module):
    """The embedding of another stage: returns NaN, so that code which reads more than the exchanged states fails."""

    def __init__(self, width: int, dtype: torch.dtype, shared: nn.Module | None = None) -> None:
        """`shared`: the embedding itself, for drafters."""
        super().__init__()
        self._width, self._dtype = width, dtype
        self.shared = shared

    def forward(self, ids: Tensor) -> Tensor:
        """[...] -> [..., K]."""
        return torch.full((*ids.shape, self._width), torch.nan, dtype=self._dtype, device=ids.device)


class OtherHead(nn.Module):
    """The output layer of another stage: returns one number for each row instead of logits."""

    def __init__(self, num_outputs: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(num_outputs, 0, dtype=dtype, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., 1]."""
        return x[..., :1]


class StageSplit:
    """The part of one rank: layers of its stage, and its columns of them. Implements `ModelSplit`."""

    def __init__(self, group: RankGroup, shares_embedding: bool = False) -> None:
        """`shares_embedding`: see `EngineConfig`."""
        self._group, self._shares_embedding = group, shares_embedding
        self._columns = Split(group.columns) if group.columns.size > 1 else None
        self._num_elsewhere = 0
        self._embedding, self._width = "", 0
        """Path of an embedding that the last stage loads for drafters, or because the output layer shares its weight;
        width of its rows."""

    def narrow(self, model: Any, state: dict[str, Any], stored: Mapping[str, Stored]) -> dict[str, Stored]:
        """Remove the modules of other stages from a model on the meta device, and their weights from what is read."""
        places = Places(model)
        paths = tuple(f"{path}." for path in self._replace(model))
        for key in [key for key in state if places.find(key)[0].startswith(paths)]:
            del state[key]
        tied: dict[str, str] = model.all_tied_weights_keys
        for pair in [pair for pair in tied.items() if any(name.startswith(paths) for name in pair)]:
            del tied[pair[0]]
        kept = {path: weight for path, weight in stored.items() if not f"{path}.".startswith(paths)}
        return kept if self._columns is None else self._columns.narrow(model, state, kept)

    def apply(self, model: Any) -> None:
        """Split the loaded layers by columns."""
        if self._columns is not None:
            self._columns.apply(model)
        if self._embedding:
            own = model.get_submodule(self._embedding) if self._shares_embedding else None
            model.set_submodule(self._embedding, OtherEmbedding(self._width, model.dtype, own))

    def num_elsewhere(self, model: Any) -> int:
        """Return the number of weights that other ranks have, each counted once."""
        return self._num_elsewhere + (0 if self._columns is None else self._columns.num_elsewhere(model))

    def _replace(self, model: Any) -> list[str]:
        """Replace modules of other stages; return their paths."""
        path, layers = _find_layers(model)
        own = stage_layers(self._group, len(layers))
        exchanges = {own.start - 1: "receive", own.stop: "send"}
        found = []
        for index, layer in enumerate(layers):
            if index not in own:
                self._num_elsewhere += _num_weights(layer)
                layers[index] = OtherLayer(layer, exchanges.get(index, ""), self._group)
                found.append(f"{path}.{index}")
        return found + self._replace_ends(model)

    def _replace_ends(self, model: Any) -> list[str]:
        """Replace the embedding and the output layer unless they are the stage's."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        paths = {id(module): path for path, module in model.named_modules()}
        table, last = paths[id(embedding)], paths[id(head)]
        is_tied = f"{last}.weight" in model.all_tied_weights_keys
        is_first, is_last = self._group.stage == 0, self._group.is_last_stage
        found = []
        if not is_last:
            model.set_submodule(last, OtherHead(output_width(head), model.dtype))
            found.append(last)
            self._num_elsewhere += 0 if is_tied and is_first else _num_weights(head)
        self._width = embedding.weight.shape[1]
        if not is_first and is_last and (is_tied or self._shares_embedding):
            self._embedding = table
        elif not is_first:
            model.set_submodule(table, OtherEmbedding(self._width, model.dtype))
            found.append(table)
            self._num_elsewhere += 0 if is_tied else _num_weights(embedding)
        return found


def _find_layers(model: Any) -> tuple[str, nn.ModuleList]:
    """The decoder layers of a model and their path.

    Raises:
        ModelRefusedError: there are none, or they read more than the hidden states of the layer before.
    """
    found = find_decoder_layers(model)
    if found is None:
        raise ModelRefusedError(f"pipeline: {type(model).__name__} has no list of its decoder layers")
    path, layers = found
    config = model.config.get_text_config(decoder=True)
    for name in _JOINING:
        if getattr(config, name, None):
            raise ModelRefusedError(f"pipeline: must be 1 with {name} = {getattr(config, name)}")
    for layer in layers:
        names = list(inspect.signature(own_forward(layer)).parameters)[2:]
        if unknown := sorted(set(names) - _INPUTS):
            raise ModelRefusedError(f"pipeline: must be 1, since {type(layer).__name__} reads {', '.join(unknown)}")
    return path, layers


def _buffers_of(module: nn.Module) -> nn.Module:
    """The buffers of a module and its children that no checkpoint stores, under their names."""
    found = nn.Module()
    for name, buffer in module.named_buffers(recurse=False):
        if name in module._non_persistent_buffers_set:
            found.register_buffer(name, buffer, persistent=False)
    for name, child in module.named_children():
        found.add_module(name, _buffers_of(child))
    return found


def _returns_tuple(layer: nn.Module) -> bool:
    names = [each.opname for each in dis.get_instructions(own_forward(layer))]
    return ("BUILD_TUPLE", "RETURN_VALUE") in zip(names, names[1:], strict=False)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _receive(x: Tensor, number: int, num: int) -> Tensor:
    return RankGroup.of(number).receive_states((num, *x.shape[1:]), x.device)


def _received_shape(x: Tensor, number: int, num: int) -> Tensor:
    return x.new_empty((num, *x.shape[1:]), dtype=RankGroup.of(number).state_type or x.dtype)


def _send(x: Tensor, number: int) -> Tensor:
    RankGroup.of(number).send_states(x)
    return x.clone()


def _sent_shape(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x)


_DEFINITIONS: dict[str, tuple[str, Any, Any]] = {
    "receive": ("(Tensor x, int group, int num) -> Tensor", _receive, _received_shape),
    "send": ("(Tensor x, int group) -> Tensor", _send, _sent_shape),
}
for _name, (_schema, _run, _shape) in _DEFINITIONS.items():
    define_operator(f"betoken_stages::{_name}", _schema, _run, _shape)
