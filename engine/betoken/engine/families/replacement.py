"""Puts a family's mixers and bindings into a loaded model, which then runs with a context only."""

from typing import Any

from torch import nn

from betoken.engine.families import family_of
from betoken.engine.families.family import Family
from betoken.engine.mixers.handed import Handed, hand_over
from betoken.engine.mixers.recurrences import bind_recurrences


def replace_mixers(model: Any) -> None:
    """Replace or bind the layers of a model as its family's record says.

    Raises:
        ModelRefusedError: a layer's code is not as it was when this was written.
    """
    family = family_of(model.config.model_type)
    handed = hand_over(model)
    bind_recurrences(model, handed, family.recurrences)
    for module in list(model.modules()):
        bind = family.bindings.get(type(module).__name__)
        if bind is not None and _is_of_transformers(module):
            bind(module)
    for parent in list(model.modules()):
        if isinstance(parent, nn.ModuleList):
            _number(parent, family)
        _replace_children(parent, family, handed)
    family.finish(model)


def _replace_children(parent: nn.Module, family: Family, handed: Handed) -> None:
    for name, child in list(parent.named_children()):
        make = family.mixers.get(type(child).__name__)
        if make is not None and _is_of_transformers(child):
            setattr(parent, name, make(child, handed))


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.")


def _number(layers: nn.ModuleList, family: Family) -> None:
    for index, layer in enumerate(layers):
        if path := family.unnumbered.get(type(layer).__name__):
            mixer: Any = layer.get_submodule(path)
            mixer.layer_idx = index
