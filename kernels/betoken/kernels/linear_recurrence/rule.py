"""Which linear recurrence a layer follows, and the tensors it keeps."""

from typing import NamedTuple

from torch import Tensor


class Recurrence(NamedTuple):
    """Which rule a layer follows."""

    scale: float
    """Factor on queries."""
    is_delta: bool
    """True: the value written is the difference from what the state holds under the key (delta rule)."""
    normalizes: bool
    """True: queries and keys are divided by their length, sqrt(sum of squares + 1e-6)."""
    weighs: bool = True
    """False: with rates, values are written as they are, not times their step."""


class RecurrentPool(NamedTuple):
    """States of N sequences, and rings of W inputs that wait; changed in place."""

    state: Tensor
    """[N, H, D, E] float32."""
    keys: Tensor
    """[N, W, G, D], dtype of the keys."""
    values: Tensor
    """[N, W, H, E], dtype of the values."""
    gates: Tensor
    """[N, W, H, F + 1] float32: log decays, then beta; [N, W, H, E] float32 with rates: steps."""
