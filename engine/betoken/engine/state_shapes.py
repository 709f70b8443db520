"""Sizes of what a recurrent layer keeps of a sequence."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Sizes of a layer's recurrence."""

    num_key_heads: int
    key_size: int
    num_heads: int
    value_size: int
    gate_size: int


@dataclass(slots=True)
class StateShape:
    """A layer's record of a sequence."""

    num_channels: int = 0
    """Channels of its convolution; 0 = none."""
    num_taps: int = 0
    """Inputs that the convolution sums, the row's own included."""
    recurrence: RecurrentShape | None = None

    def snapshot_bytes(self, itemsize: int) -> int:
        """Bytes of its state, and of the last inputs of its convolution."""
        sizes = self.recurrence
        state = 4 * sizes.num_heads * sizes.key_size * sizes.value_size if sizes is not None else 0
        return state + max(0, self.num_taps - 1) * self.num_channels * itemsize
