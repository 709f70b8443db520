"""The tensors of snapshots: of each layer the committed state, and the last inputs of its convolution.

It knows states, snapshots and lengths, not pages or sequences.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from betoken.engine.kv_pool import zeros
from betoken.engine.snapshots import StateCopy
from betoken.engine.state_shapes import StateShape
from betoken.kernels.linear_recurrence.rule import RecurrentPool


class SnapshotPool:
    """Snapshots of every layer; on a CPU they take memory once they are used."""

    def __init__(
        self, shapes: Mapping[int, StateShape], num_snapshots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inputs: dict[int, Tensor] = {}
        """Layer -> [snapshots, taps - 1, C] inputs of its convolution, the oldest first."""
        self._states: dict[int, Tensor] = {}
        """Layer -> [snapshots, H, D, E]."""
        if not num_snapshots:
            return
        for layer, shape in shapes.items():
            if shape.num_channels and shape.num_taps > 1:
                size = (num_snapshots, shape.num_taps - 1, shape.num_channels)
                self._inputs[layer] = zeros(size, dtype, device)
            if (sizes := shape.recurrence) is not None:
                state = (num_snapshots, sizes.num_heads, sizes.key_size, sizes.value_size)
                self._states[layer] = zeros(state, torch.float32, device)

    def copy(
        self, rings: Mapping[int, Tensor], recurrent: Mapping[int, RecurrentPool], copies: Sequence[StateCopy]
    ) -> None:
        """Make copies, one after the other, between snapshots and the states of a pool."""
        for copy in copies:
            for layer, snapshots in self._states.items():
                _copy(snapshots[copy.snapshot], recurrent[layer].state[copy.state], copy.is_restore)
            for layer, inputs in self._inputs.items():
                ring, num_inputs = rings[layer][copy.state], inputs.shape[1]
                for index in range(num_inputs):  # slots before the text have no owner: rows do not read them
                    slot = copy.length - num_inputs + index
                    _copy(inputs[copy.snapshot, index], ring[slot % len(ring)], copy.is_restore)


def _copy(snapshot: Tensor, state: Tensor, is_restore: bool) -> None:
    if is_restore:
        state.copy_(snapshot)
    else:
        snapshot.copy_(state)
