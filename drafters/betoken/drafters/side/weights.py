"""Weights of a drafter on hidden states, as an option of the worker names them: their files, states and memory.

Knows settings and files; no target and no sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.side.files import weight_files
from betoken.drafters.spec import Memory
from betoken.engine.errors import ModelRefusedError
from betoken.engine.kv_pool import LayerShape
from betoken.engine.weights.checkpoint import resolve_directory


class KvSizes(Protocol):
    """Sizes of layers with their own KV."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


class SideShape(KvSizes, Protocol):
    """Sizes of layers that read states of the target."""

    def states_of(self, num_layers: int) -> Sequence[int]:
        """States that the layers read of a target with so many layers."""
        ...


def kv_shape(shape: KvSizes) -> LayerShape:
    """The record of a token in one layer."""
    return LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)


@dataclass(frozen=True, slots=True)
class SideWeights:
    """The option of a drafter that names its weights."""

    option: str
    """Name of the setting."""
    pickles: tuple[str, ...] = ()
    """Further files that hold weights."""

    def directory(self, settings: Any) -> Path:
        """Directory of the weights, downloaded if need be.

        Raises:
            ModelRefusedError: it cannot be found.
        """
        return resolve_directory(getattr(settings, self.option), None, also=self.pickles)

    def refusal(self, settings: Any, error: ModelRefusedError) -> FailedPreconditionError:
        """The error that names the option and its value."""
        flag = self.option.replace("_", "-")
        return FailedPreconditionError(f"--{flag} = {getattr(settings, self.option)}: {error}")

    def state_layers(self, settings: Any, num_layers: int, read_shape: Callable[[Path], SideShape]) -> Sequence[int]:
        """States of a target with so many layers that the weights read.

        Raises:
            FailedPreconditionError: the weights cannot be read, or the target has no such layers.
        """
        try:
            return read_shape(self.directory(settings)).states_of(num_layers)
        except ModelRefusedError as error:
            raise self.refusal(settings, error) from error

    def memory(self, settings: Any, read_shape: Callable[[Path], KvSizes] | None = None) -> Memory:
        """Memory of the weights as they are stored and, with a shape, of a page of KV for each of the target's.

        Raises:
            FailedPreconditionError: the weights cannot be read.
        """
        itemsize = itemsize_of(settings)
        try:
            directory, page_bytes = self.directory(settings), 0
            if read_shape is not None:
                shape = read_shape(directory)
                page_bytes = shape.num_layers * kv_shape(shape).page_bytes(settings.page_size, itemsize)
            return Memory(sum(path.stat().st_size for path in weight_files(directory)), page_bytes)
        except ModelRefusedError as error:
            raise self.refusal(settings, error) from error


def itemsize_of(settings: Any) -> int:
    """Bytes of a number in the target's type."""
    return 2 if settings.dtype in ("bfloat16", "float16") else 4


def columns_of(state_layers: Sequence[int]) -> list[int]:
    """Column of each state among the received features, which hold each state once, in the order of the layers."""
    places = {layer: place for place, layer in enumerate(sorted(set(state_layers)))}
    return [places[layer] for layer in state_layers]
