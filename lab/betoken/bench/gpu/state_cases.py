"""Cases of the ops over recurrent states: linear_recurrence by each of its rules, and state_conv.

A verify step: each sequence applies what its last result accepted, then runs a block of rows behind the committed one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.bench.gpu.case import Arguments, Case, reference_sides
from betoken.kernels.linear_recurrence import Recurrence, RecurrentPool, linear_recurrence
from betoken.kernels.state_conv import state_conv
from betoken.kernels.state_rows import StateRows

_DTYPE = torch.bfloat16
_CONTEXT = 512
_NUM_ACCEPTED = 3
"""Drafts of the last block that the state has not seen yet."""
_NUM_TAPS = 4


@dataclass(frozen=True, slots=True)
class Layer:
    """Sizes of a layer's recurrence."""

    name: str
    num_key_heads: int
    num_heads: int
    key_size: int
    value_size: int
    is_delta: bool
    decay_size: int = 1
    has_rates: bool = False
    """Whether each element of the state decays at its own rate, times a row's step."""

    @property
    def gate_size(self) -> int:
        """Gates of a head: log decays and beta, or steps."""
        return self.value_size if self.has_rates else self.decay_size + 1

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return 4 * self.num_heads * self.key_size * self.value_size

    @property
    def row_bytes(self) -> int:
        """Bytes of a row's inputs and output."""
        ours = 2 * self.num_key_heads * self.key_size + self.num_heads * self.value_size
        return ours * _DTYPE.itemsize + 4 * self.num_heads * (self.gate_size + self.value_size)


LAYERS = (
    Layer("gated delta of Qwen3-Next", 16, 32, 128, 128, is_delta=True),
    Layer("Kimi's delta attention", 32, 32, 128, 128, is_delta=True, decay_size=128),
    Layer("Mamba-2 of Nemotron-H", 8, 128, 128, 64, is_delta=False),
    Layer("Mamba-1 of Jamba", 1, 1, 16, 8192, is_delta=False, has_rates=True),
)


def state_cases(
    device: torch.device, layers: tuple[Layer, ...] = LAYERS, num_channels: int = 8192, most_sequences: int = 32
) -> Iterator[Case]:
    """Every case of this file."""
    for layer in layers:
        for num_sequences, num_rows in ((1, 1), (1, 6), (most_sequences, 6)):
            yield _recurrence_case(device, layer, num_sequences, num_rows)
    yield _conv_case(device, num_channels, most_sequences, num_rows=6)


def _columns(device: torch.device, num_sequences: int, num_rows: int) -> tuple[Tensor, ...]:
    """The six columns of `StateRows`: blocks of rows after a context, whose last few tokens wait."""

    def column(values: Tensor) -> Tensor:
        return values.to(torch.int32).to(device)

    sequences = torch.arange(num_sequences)
    same = torch.ones(num_sequences)
    return (
        column(torch.arange(_CONTEXT, _CONTEXT + num_rows).repeat(num_sequences)),
        column(sequences.repeat_interleave(num_rows)),
        column(1 + torch.randperm(num_sequences)),
        column(same * (_CONTEXT - _NUM_ACCEPTED)),
        column(same * _CONTEXT),
        column(same * (_CONTEXT + 1)),
    )


def _rows(columns: Sequence[Tensor]) -> StateRows:
    positions, row_segments, states, applied, first_slots, committed = columns
    return StateRows(positions, row_segments, states, applied, first_slots, committed)


def _recurrence_case(device: torch.device, layer: Layer, num_sequences: int, num_rows: int) -> Case:
    total, waiting = num_sequences * num_rows, 2 * num_rows + 2 + _NUM_ACCEPTED
    rule = Recurrence(layer.key_size**-0.5, is_delta=layer.is_delta, normalizes=layer.is_delta)

    def keys(*lead: int) -> Tensor:
        return torch.randn(*lead, layer.num_key_heads, layer.key_size, device=device).to(_DTYPE)

    def values(*lead: int) -> Tensor:
        return torch.randn(*lead, layer.num_heads, layer.value_size, device=device).to(_DTYPE)

    def gates(*lead: int) -> Tensor:
        if layer.has_rates:
            return torch.rand(*lead, layer.num_heads, layer.value_size, device=device)
        decays = -torch.rand(*lead, layer.num_heads, layer.decay_size, device=device)
        return torch.cat([decays, torch.rand(*lead, layer.num_heads, 1, device=device)], dim=-1)

    def fresh() -> Arguments:
        lead = (num_sequences + 1, waiting)
        state = torch.randn(lead[0], layer.num_heads, layer.key_size, layer.value_size, device=device)
        pool = (state, keys(*lead), values(*lead), gates(*lead))
        rates = (-torch.rand(*state.shape[1:], device=device),) if layer.has_rates else ()
        columns = _columns(device, num_sequences, num_rows)
        return (keys(total), keys(total), values(total), gates(total), *pool, *columns, *rates)

    def run(query: Tensor, key: Tensor, value: Tensor, given: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        pool = RecurrentPool(*rest[:4])
        rates = rest[10] if layer.has_rates else None
        out = linear_recurrence(query, key, value, given, pool, _rows(rest[4:10]), rule, rates)
        return (out, *pool)

    return Case(
        op="linear_recurrence",
        shape=f"{layer.name}, {num_sequences} sequences, {num_rows} rows each, {layer.num_key_heads}/{layer.num_heads}"
        f" heads, states {layer.key_size} by {layer.value_size}, bfloat16",
        num_bytes=num_sequences * (2 * layer.state_bytes + _NUM_ACCEPTED * layer.row_bytes) + total * layer.row_bytes,
        fresh=fresh,
        run=run,
        tolerance=1e-5,  # sums over a key in another order
        others=reference_sides(run),
    )


def _conv_case(device: torch.device, num_channels: int, num_sequences: int, num_rows: int) -> Case:
    total, ring_size = num_sequences * num_rows, 2 * num_rows + 2 + _NUM_TAPS - 1

    def fresh() -> Arguments:
        def inputs(*lead: int) -> Tensor:
            return torch.randn(*lead, num_channels, device=device).to(_DTYPE)

        return (
            *(inputs(total), inputs(_NUM_TAPS), inputs(num_sequences + 1, ring_size)),
            *_columns(device, num_sequences, num_rows),
        )

    def run(x: Tensor, weight: Tensor, ring: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        return (state_conv(x, weight, None, ring, _rows(columns)), ring)

    return Case(
        op="state_conv",
        shape=f"{num_sequences} sequences, {num_rows} rows each, {_NUM_TAPS} of {num_channels} channels, bfloat16",
        num_bytes=(3 * total + num_sequences * (_NUM_TAPS - 1)) * num_channels * _DTYPE.itemsize,
        fresh=fresh,
        run=run,
        tolerance=torch.finfo(_DTYPE).eps,  # both round once
        others=reference_sides(run),
    )
