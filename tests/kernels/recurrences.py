"""Random recurrences over committed states, in any split of a text into forwards: shared by tests of the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.engine.tree import place_nodes
from betoken.kernels.linear_recurrence import Recurrence, RecurrentPool
from betoken.kernels.rows import TreePaths
from betoken.kernels.state_rows import StateRows

DELTA = Recurrence(0.25, is_delta=True, normalizes=True)
SSD = Recurrence(1.0, is_delta=False, normalizes=False)
LRU = Recurrence(1.0, is_delta=False, normalizes=False, weighs=False)
NUM_WAITING = 16


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer."""

    key_heads: int = 2
    key_size: int = 8
    heads: int = 4
    value_size: int = 12
    decay_size: int = 1
    dtype: torch.dtype = torch.float32
    has_rates: bool = False

    @property
    def gate_size(self) -> int:
        return self.value_size if self.has_rates else self.decay_size + 1


def make_rates(shape: Shape) -> Tensor | None:
    """Log decays of a step of 1, of every size."""
    if not shape.has_rates:
        return None
    generator = torch.Generator().manual_seed(17)
    return -torch.randn(shape.heads, shape.key_size, shape.value_size, generator=generator).exp()


@dataclass
class Inputs:
    """A text's inputs, one a token."""

    query: Tensor
    key: Tensor
    value: Tensor
    gates: Tensor

    def take(self, index: Sequence[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        at = torch.tensor(list(index))
        return self.query[at], self.key[at], self.value[at], self.gates[at]


def make_inputs(num_tokens: int, shape: Shape, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(num_tokens, *sizes, generator=generator)

    decay = -torch.rand(num_tokens, shape.heads, shape.decay_size, generator=generator)
    beta = torch.rand(num_tokens, shape.heads, 1, generator=generator)
    gates = torch.cat([decay, beta], dim=-1)
    if shape.has_rates:
        gates = torch.rand(num_tokens, shape.heads, shape.value_size, generator=generator)
    return Inputs(
        normal(shape.key_heads, shape.key_size).to(shape.dtype),
        normal(shape.key_heads, shape.key_size).to(shape.dtype),
        normal(shape.heads, shape.value_size).to(shape.dtype),
        gates,
    )


def make_pool(num_states: int, shape: Shape, num_waiting: int = NUM_WAITING) -> RecurrentPool:
    """States and rings of noise: what was never written must not be read."""
    generator = torch.Generator().manual_seed(99)
    lead = (num_states, num_waiting)

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator)

    return RecurrentPool(
        noise(num_states, shape.heads, shape.key_size, shape.value_size),
        noise(*lead, shape.key_heads, shape.key_size).to(shape.dtype),
        noise(*lead, shape.heads, shape.value_size).to(shape.dtype),
        noise(*lead, shape.heads, shape.gate_size),
    )


@dataclass(frozen=True)
class Step:
    """The rows of one sequence in a forward: `num_rows` from slot `first` on."""

    state: int
    applied: int
    first: int
    num_rows: int
    committed: int
    parents: Sequence[int] | None = None
    """Parents of the last len(parents) slots."""


def make_rows(steps: Sequence[Step]) -> StateRows:
    positions: list[int] = []
    segments: list[int] = []
    paths: list[list[int]] = []
    for index, step in enumerate(steps):
        end = step.first + step.num_rows
        segments += [index] * step.num_rows
        if step.parents is None:
            positions += range(step.first, end)
            paths += [[]] * step.num_rows
            continue
        start = end - len(step.parents)
        placed, forked = place_nodes(step.parents, start, first_node=step.first - start)
        chain = list(range(step.first, start))
        positions += chain + placed
        paths += [[]] * len(chain) + [forked.get(node, []) for node in range(len(placed))]

    def column(numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32)

    tree = None
    if any(paths):
        starts = [0]
        for path in paths:
            starts.append(starts[-1] + len(path))
        tree = TreePaths(column(starts), column([slot for path in paths for slot in path]))
    return StateRows(
        column(positions),
        column(segments),
        column([step.state for step in steps]),
        column([step.applied for step in steps]),
        column([step.first for step in steps]),
        column([step.committed for step in steps]),
        tree,
    )
