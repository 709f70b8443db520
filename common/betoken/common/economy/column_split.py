"""Gathers of a dense model whose layers are split by output columns among devices, and the decode step that results.

Every output is one sum made by one device, so results are gathered and never added; docs/devices.md has the split.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from betoken.common.errors import InvalidArgumentError

GATHERS_PER_LAYER = 4
"""Heads' outputs, output projection, product of the MLP, down projection."""
_OTHER_GATHERS = 2
"""Embedding and logits."""
_ACTIVATION_BYTES, _LOGIT_BYTES = 2, 4
_MAX_DEVICES = 64


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a dense transformer."""

    num_layers: int
    hidden_size: int
    attention_size: int
    """Width of all heads' outputs."""
    intermediate_size: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ColumnSplit:
    """A split of a model among devices.

    Raises:
        InvalidArgumentError: a value is outside its range; names field, value and limit.
    """

    shape: ModelShape
    devices: int
    """Devices, one rank on each."""
    link_gb_s: float
    """Bandwidth into one device, gigabytes per second."""
    gather_us: float
    """Time of a gather of a few bytes, microseconds."""
    target_step_ms: float
    """Decode step on one device with `batch` sequences, milliseconds."""
    batch: int

    def __post_init__(self) -> None:
        for name, low, high in (
            ("devices", 2, _MAX_DEVICES),
            ("link_gb_s", 1e-3, 1e6),
            ("gather_us", 0, 1e9),
        ):
            value = getattr(self, name)
            if not (isfinite(value) and low <= value <= high):
                raise InvalidArgumentError(name, value, f"must be {low:g} to {high:.10g}")

    @property
    def layer_bytes(self) -> int:
        """Bytes that the gathers of a layer give for one token."""
        shape = self.shape
        return _ACTIVATION_BYTES * (shape.attention_size + 2 * shape.hidden_size + shape.intermediate_size)

    @property
    def token_bytes(self) -> int:
        """Bytes that the gathers of a step give for one token: all layers, embedding and logits."""
        shape = self.shape
        embedding = _ACTIVATION_BYTES * self.devices * shape.hidden_size
        return shape.num_layers * self.layer_bytes + embedding + _LOGIT_BYTES * shape.vocab_size

    @property
    def num_gathers(self) -> int:
        """Gathers of a step, for any number of tokens."""
        return GATHERS_PER_LAYER * self.shape.num_layers + _OTHER_GATHERS

    @property
    def gather_ms(self) -> float:
        """Time of a step's gathers, milliseconds; a device receives the bytes of the others only."""
        received = self.batch * self.token_bytes * (self.devices - 1) / self.devices
        return self.num_gathers * self.gather_us / 1e3 + received / (self.link_gb_s * 1e6)

    @property
    def step_ms(self) -> float:
        """Decode step on all devices, milliseconds, if each reads its part of the weights in its part of the time."""
        return self.target_step_ms / self.devices + self.gather_ms

    @property
    def speedup(self) -> float:
        """Decode step on one device over the step on all."""
        return self.target_step_ms / self.step_ms
