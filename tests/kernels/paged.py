"""Sequences of random keys and values in shuffled pages, cases of them, and attention by definition."""

import torch
from torch import Tensor
from torch.nn import functional

from betoken.kernels.kv_write import kv_write
from betoken.kernels.rows import PagedRows

PAGE_SIZE = 16


def make_case(
    lengths: list[tuple[int, int]],
    num_heads: int = 4,
    num_key_heads: int = 2,
    key_size: int = 64,
    value_size: int = 64,
    dtype: torch.dtype = torch.float32,
    page_size: int = PAGE_SIZE,
) -> tuple[Tensor, Tensor, Tensor, PagedRows, list[tuple[Tensor, Tensor]]]:
    """Sequences of (length, new rows) in shuffled pages; unwritten slots hold 100, so a stray read shows."""
    generator = torch.Generator().manual_seed(7)
    page_counts = [-(-length // page_size) for length, _ in lengths]
    order = torch.randperm(sum(page_counts) + 3, generator=generator).int()
    key_cache = torch.full((len(order), page_size, num_key_heads, key_size), 100.0, dtype=dtype)
    value_cache = torch.full((len(order), page_size, num_key_heads, value_size), 100.0, dtype=dtype)
    starts = torch.tensor([0, *page_counts]).cumsum(0).int()
    sequences, positions, segments = [], [], []
    for index, (length, num_new) in enumerate(lengths):
        key = torch.randn(length, num_key_heads, key_size, generator=generator).to(dtype)
        value = torch.randn(length, num_key_heads, value_size, generator=generator).to(dtype)
        everything = PagedRows(
            torch.arange(length).int(), torch.full((length,), index).int(), starts, order[: sum(page_counts)]
        )
        kv_write(key, value, key_cache, value_cache, everything)
        sequences.append((key, value))
        positions += range(length - num_new, length)
        segments += [index] * num_new
    query = torch.randn(len(positions), num_heads, key_size, generator=generator).to(dtype)
    rows = PagedRows(torch.tensor(positions).int(), torch.tensor(segments).int(), starts, order[: sum(page_counts)])
    return query, key_cache, value_cache, rows, sequences


def take_options(case: dict, dtype: torch.dtype) -> dict:
    """Remove from a case what is an option of the attention and return it; sinks are small and large, head by head."""
    sinks = torch.linspace(-4, 8, case.get("num_heads", 4)).to(dtype) if case.pop("has_sinks", False) else None
    slopes = torch.linspace(0.01, 0.7, case.get("num_heads", 4)) if case.pop("has_slopes", False) else None
    numbers = {"window": case.pop("window", 0), "softcap": case.pop("softcap", 0.0), "span": case.pop("span", 0)}
    return {**numbers, "sinks": sinks, "slopes": slopes}


def by_definition(
    query: Tensor,
    sequences: list[tuple[Tensor, Tensor]],
    rows: PagedRows,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    span: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """Softmax attention in float64, row by row; a sink is one more score, whose weight is dropped."""
    out = []
    for row, (position, segment) in enumerate(zip(rows.positions.tolist(), rows.row_segments.tolist(), strict=True)):
        first = max(0, position - window + 1) if window else 0
        first = max(first, position - position % span) if span else first
        key, value = (part[first : position + 1].double() for part in sequences[segment])
        group = query.shape[1] // key.shape[1]
        scores = torch.einsum("hd,thd->ht", query[row].double(), key.repeat_interleave(group, 1)) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        if slopes is not None:
            scores = scores - slopes.double()[:, None] * (position - torch.arange(first, position + 1))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], -1)
        weights = functional.softmax(scores, -1)[:, : len(key)]
        out.append(torch.einsum("ht,thd->hd", weights, value.repeat_interleave(group, 1)))
    return torch.stack(out)


CASES = {
    "one token": {"lengths": [(1, 1)]},
    "decode beside prefill": {"lengths": [(300, 1), (17, 17), (600, 5), (16, 16)]},
    "chunk borders": {"lengths": [(255, 2), (256, 2), (257, 2), (513, 3)]},
    "window": {"lengths": [(300, 40), (20, 3)], "window": 19},
    "window over a chunk": {"lengths": [(900, 3)], "window": 300},
    "soft cap": {"lengths": [(40, 9)], "softcap": 3.0},
    "many heads a key": {"lengths": [(50, 3)], "num_heads": 24, "num_key_heads": 1},
    "odd sizes": {"lengths": [(33, 5)], "key_size": 24, "value_size": 40},
    "large heads": {"lengths": [(70, 6)], "key_size": 256, "value_size": 256},
    "wide by half": {"lengths": [(70, 6)], "key_size": 96, "value_size": 96},
    "odd pages": {"lengths": [(70, 6), (9, 2)], "page_size": 5},
    "spans": {"lengths": [(300, 40), (20, 3), (32, 2)], "span": 16},
    "spans over a chunk": {"lengths": [(900, 3), (601, 3)], "span": 300},
    "slopes": {"lengths": [(300, 40), (20, 3)], "has_slopes": True},
    "slopes, many heads a key": {"lengths": [(50, 3)], "num_heads": 24, "num_key_heads": 1, "has_slopes": True},
    "sinks": {"lengths": [(255, 2), (256, 2), (257, 2), (1, 1)], "has_sinks": True},
    "sinks, window": {"lengths": [(270, 6), (20, 3)], "window": 19, "has_sinks": True},
    "sinks, soft cap, many heads a key": {
        "lengths": [(50, 3)],
        "num_heads": 24,
        "num_key_heads": 1,
        "softcap": 3.0,
        "has_sinks": True,
    },
}
