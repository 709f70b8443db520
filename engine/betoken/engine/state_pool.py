"""The tensors of recurrent states: one committed state a sequence and layer, and rings of inputs that wait.

It knows layers, states and slots, not sequences. A ring holds the inputs of tokens that a result may still reject,
each at its slot modulo the ring's size; a convolution's ring also holds the inputs of the last few tokens before them.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from betoken.engine.kv_pool import zeros
from betoken.engine.snapshot_pool import SnapshotPool
from betoken.engine.snapshots import StateCopy
from betoken.engine.state_shapes import StateShape
from betoken.engine.tree import KeptPath
from betoken.kernels.linear_recurrence.rule import RecurrentPool


class StatePool:
    """States 0 to `num_states` of every layer; state 0 is for rows of no sequence."""

    def __init__(
        self,
        shapes: Mapping[int, StateShape],
        num_states: int,
        num_waiting: int,
        dtype: torch.dtype,
        device: torch.device,
        num_snapshots: int = 0,
    ) -> None:
        """`num_waiting`: most tokens after the committed ones."""
        self._snapshots = SnapshotPool(shapes, num_snapshots, dtype, device)
        self.num_waiting = num_waiting
        self.rings: dict[int, Tensor] = {}
        """Layer -> [states, num_waiting + taps - 1, C] inputs of its convolution."""
        self.recurrent: dict[int, RecurrentPool] = {}
        for layer, shape in shapes.items():
            if shape.num_channels:
                size = (num_states + 1, num_waiting + shape.num_taps - 1, shape.num_channels)
                self.rings[layer] = zeros(size, dtype, device)
            if (sizes := shape.recurrence) is not None:
                lead = (num_states + 1, num_waiting)
                state = (num_states + 1, sizes.num_heads, sizes.key_size, sizes.value_size)
                self.recurrent[layer] = RecurrentPool(
                    zeros(state, torch.float32, device),
                    zeros((*lead, sizes.num_key_heads, sizes.key_size), dtype, device),
                    zeros((*lead, sizes.num_heads, sizes.value_size), dtype, device),
                    zeros((*lead, sizes.num_heads, sizes.gate_size), torch.float32, device),
                )
        self._empty = torch.empty(0, dtype=dtype, device=device)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states and rings."""
        return sum(
            tensor[0].numel() * tensor.element_size() for tensors in self.layers() for tensor in tensors if len(tensor)
        )

    def layers(self) -> list[list[Tensor]]:
        """The tensors of layers 0, 1, ...: a ring, then the four of a recurrence; empty if a layer has none."""
        last = max([*self.rings, *self.recurrent])
        return [
            [self.rings.get(layer, self._empty), *self.recurrent.get(layer, [self._empty] * 4)]
            for layer in range(last + 1)
        ]

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """Move the waiting inputs of each path to the slots of a chain."""
        rings = [ring for tensors in self.layers() for index, ring in enumerate(tensors) if len(ring) and index != 1]
        for path in paths:
            state = path.page_ids.state.index  # type: ignore[attr-defined]  # a model with states has page lists
            moved = [(node, i) for i, node in enumerate(path.nodes) if node != i]
            if not moved:
                continue
            for ring in rings:
                size = ring.shape[1]
                sources = [(path.tree_start + node) % size for node, _ in moved]
                targets = [(path.tree_start + i) % size for _, i in moved]
                ring[state, targets] = ring[state, sources]

    def copy(self, copies: Sequence[StateCopy]) -> None:
        """Copy states to snapshots and back, one after the other."""
        self._snapshots.copy(self.rings, self.recurrent, copies)
