"""Cases of the ops over the paged KV cache: attention, kv_write, kv_compact, short_conv."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from betoken.bench.gpu.case import Arguments, Case, Side, reference_sides
from betoken.kernels.attention import attention
from betoken.kernels.kv_compact import kv_compact, kv_compact_reference
from betoken.kernels.kv_write import kv_write, kv_write_reference
from betoken.kernels.rows import PagedRows
from betoken.kernels.short_conv import short_conv, short_conv_reference

PAGE_SIZE = 16
_DTYPE = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a Llama-3-8B layer, unless a test asks for fewer."""

    num_heads: int = 32
    num_key_heads: int = 8
    size: int = 128

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's key and value."""
        return 2 * self.num_key_heads * self.size * _DTYPE.itemsize


def paged_cases(
    device: torch.device, shape: Shape | None = None, max_context: int = 4096, num_sequences: int = 32
) -> Iterator[Case]:
    """Every case of this file."""
    shape = shape or Shape()
    for num_attended, num_rows in ((1, 6), (num_sequences, 1), (num_sequences, 6)):
        yield _attention_case(device, shape, num_attended, num_rows, max_context)
    yield _write_case(device, shape, num_sequences, num_rows=6, context=max_context)
    yield _compact_case(device, shape, num_sequences, num_moves=6)
    yield _short_conv_case(device, shape, num_sequences, num_rows=6, context=max_context)


def _caches(device: torch.device, shape: Shape, num_pages: int) -> tuple[Tensor, Tensor]:
    lead = (num_pages, PAGE_SIZE, shape.num_key_heads, shape.size)
    return torch.randn(*lead, device=device).to(_DTYPE), torch.randn(*lead, device=device).to(_DTYPE)


def _columns(device: torch.device, num_sequences: int, num_rows: int, context: int) -> tuple[Tensor, ...]:
    """positions, row_segments, page_starts, page_ids: the last `num_rows` positions of sequences in shuffled pages."""
    pages_each = -(-context // PAGE_SIZE)
    last = torch.arange(context - num_rows, context, device=device)
    return (
        last.repeat(num_sequences).int(),
        torch.arange(num_sequences, device=device).repeat_interleave(num_rows).int(),
        torch.arange(0, (num_sequences + 1) * pages_each, pages_each, device=device).int(),
        torch.randperm(num_sequences * pages_each, device=device).int(),
    )


def _rows(columns: Sequence[Tensor], context: int) -> PagedRows:
    positions, row_segments, page_starts, page_ids = columns
    return PagedRows(positions, row_segments, page_starts, page_ids, max_length=context)


def _attention_case(device: torch.device, shape: Shape, num_sequences: int, num_rows: int, context: int) -> Case:
    total = num_sequences * num_rows

    def fresh() -> Arguments:
        query = torch.randn(total, shape.num_heads, shape.size, device=device).to(_DTYPE)
        caches = _caches(device, shape, num_sequences * -(-context // PAGE_SIZE))
        return (query, *caches, *_columns(device, num_sequences, num_rows, context))

    def run(query: Tensor, key_cache: Tensor, value_cache: Tensor, *columns: Tensor) -> tuple[Tensor]:
        rows = _rows(columns, context)
        return (attention(query, key_cache, value_cache, rows, scale=shape.size**-0.5),)

    return Case(
        op="attention",
        shape=f"{num_sequences} sequences of {context}, {num_rows} rows each, {shape.num_heads}/{shape.num_key_heads}"
        f" heads of {shape.size}, bfloat16",
        num_bytes=num_sequences * context * shape.slot_bytes + 2 * total * shape.num_heads * shape.size * 2,
        fresh=fresh,
        run=run,
        tolerance=torch.finfo(_DTYPE).eps,  # both round once, from float32 sums in different orders
        others=[Side("torch eager, dense keys", _dense_attention(device, shape, num_sequences, num_rows, context))],
    )


def _dense_attention(
    device: torch.device, shape: Shape, num_sequences: int, num_rows: int, context: int
) -> Callable[..., Any]:
    """Torch's own attention over contiguous keys, unlike paged ones: its best case."""
    visible = torch.ones(num_rows, context, dtype=torch.bool, device=device).tril(context - num_rows)
    made: list[Tensor] = []

    def call(query: Tensor, *_: Tensor) -> Tensor:
        if not made:
            lead = (num_sequences, shape.num_key_heads, context, shape.size)
            made.extend(torch.randn(*lead, device=device).to(_DTYPE) for _ in range(2))
        heads = query.view(num_sequences, num_rows, shape.num_heads, shape.size).transpose(1, 2)
        key, value = made
        return functional.scaled_dot_product_attention(heads, key, value, attn_mask=visible, enable_gqa=True)

    return call


def _write_case(device: torch.device, shape: Shape, num_sequences: int, num_rows: int, context: int) -> Case:
    total = num_sequences * num_rows

    def fresh() -> Arguments:
        new = [torch.randn(total, shape.num_key_heads, shape.size, device=device).to(_DTYPE) for _ in range(2)]
        caches = _caches(device, shape, num_sequences * -(-context // PAGE_SIZE))
        return (*new, *caches, *_columns(device, num_sequences, num_rows, context))

    def run(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *columns: Tensor) -> tuple[Tensor, ...]:
        kv_write(key, value, key_cache, value_cache, _rows(columns, context))
        return (key_cache, value_cache)

    def reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, *columns: Tensor) -> None:
        kv_write_reference(key, value, key_cache, value_cache, _rows(columns, context))

    return Case(
        op="kv_write",
        shape=f"R={total}, {shape.num_key_heads} heads of {shape.size}, bfloat16",
        num_bytes=2 * total * shape.slot_bytes,
        fresh=fresh,
        run=run,
        others=reference_sides(run, reference),
    )


def _compact_case(device: torch.device, shape: Shape, num_sequences: int, num_moves: int) -> Case:
    pages_each = 4
    num_moved = num_sequences * num_moves

    def fresh() -> Arguments:
        caches = _caches(device, shape, num_sequences * pages_each)
        first = torch.arange(num_sequences, device=device)[:, None] * pages_each * PAGE_SIZE
        targets = first + torch.arange(num_moves, device=device)
        gaps = torch.randint(1, 6, (num_sequences, num_moves), device=device)
        sources = targets + gaps.cumsum(dim=1)  # each further behind its target than the one before
        starts = torch.arange(0, num_moved + 1, num_moves, device=device)
        return (*caches, sources.flatten(), targets.flatten(), starts)

    def run(key_cache: Tensor, value_cache: Tensor, *moves: Tensor) -> tuple[Tensor, ...]:
        kv_compact(key_cache, value_cache, *moves)
        return (key_cache, value_cache)

    return Case(
        op="kv_compact",
        shape=f"{num_sequences} paths of {num_moves} moves, {shape.num_key_heads} heads of {shape.size}, bfloat16",
        num_bytes=num_moved * (2 * shape.slot_bytes + 16),
        fresh=fresh,
        run=run,
        others=reference_sides(run, kv_compact_reference),
    )


def _short_conv_case(device: torch.device, shape: Shape, num_sequences: int, num_rows: int, context: int) -> Case:
    """LFM2's: three inputs a sum, as many channels as half the queries are wide."""
    total, num_taps, num_channels = num_sequences * num_rows, 3, shape.num_heads * shape.size // 2
    num_pages = num_sequences * -(-context // PAGE_SIZE)

    def fresh() -> Arguments:
        inputs = torch.randn(num_pages, PAGE_SIZE, num_channels, device=device).to(_DTYPE)
        weight = torch.randn(num_taps, num_channels, device=device).to(_DTYPE)
        return (inputs, weight, *_columns(device, num_sequences, num_rows, context))

    def run(inputs: Tensor, weight: Tensor, *columns: Tensor) -> tuple[Tensor]:
        return (short_conv(inputs, weight, None, _rows(columns, context)),)

    def reference(inputs: Tensor, weight: Tensor, *columns: Tensor) -> tuple[Tensor]:
        return (short_conv_reference(inputs, weight, None, _rows(columns, context)),)

    return Case(
        op="short_conv",
        shape=f"R={total}, {num_taps} of {num_channels} channels, bfloat16",
        num_bytes=(num_taps + 1) * total * num_channels * 2,
        fresh=fresh,
        run=run,
        tolerance=torch.finfo(_DTYPE).eps,  # both round once
        others=reference_sides(run, reference),
    )
