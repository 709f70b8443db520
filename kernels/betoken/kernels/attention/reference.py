"""Reference of the paged attention in torch: plain, slow, and the same for every row whatever its neighbours."""

import torch
from torch import Tensor

from betoken.kernels.rows import PagedRows

CHUNK_SIZE = 256
"""Keys are reduced in chunks of this many absolute positions, in order."""


def attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    span: int = 0,
    slopes: Tensor | None = None,
) -> Tensor:
    """See `betoken.kernels.attention.attention`."""
    num_rows, num_heads, _ = query.shape
    out = torch.empty(num_rows, num_heads, value_cache.shape[3], dtype=query.dtype, device=query.device)
    starts = rows.page_starts.tolist()
    segments = rows.row_segments.tolist()
    paths = _paths(rows)
    gathered: dict[tuple[int, int, int], tuple[Tensor, Tensor]] = {}  # (sequence, chunk, row) -> keys, values
    for row, position in enumerate(rows.positions.tolist()):
        page_ids = rows.page_ids[starts[segments[row]] : starts[segments[row] + 1]]
        fork = position + 1 - len(paths[row])
        first = max(0, position - window + 1) if window else 0
        first = max(first, position // span * span) if span else first
        running = None
        for chunk in range(first // CHUNK_SIZE, position // CHUNK_SIZE + 1):
            is_shared = fork >= min(position + 1, (chunk + 1) * CHUNK_SIZE)
            place = (segments[row], chunk, -1 if is_shared else row)
            if place not in gathered:
                slots = torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE, device=page_ids.device)
                if not is_shared:
                    on_path = (slots >= fork) & (slots <= position)
                    slots[on_path] = paths[row][slots[on_path] - fork]
                gathered[place] = _gather(key_cache, value_cache, page_ids, slots)
            part = _chunk(query[row].float() * scale, *gathered[place], chunk, first, position, softcap, slopes)
            running = part if running is None else _combine(running, part)
        assert running is not None  # position // CHUNK_SIZE is always visited
        if sinks is not None:  # as a last chunk, of one key without a value
            own = sinks.float().reshape(running[0].shape)
            running = _combine(running, (own, torch.ones_like(own), torch.zeros_like(running[2])))
        out[row] = (running[2] / running[1]).reshape(num_heads, -1).to(out.dtype)
    return out


def _paths(rows: PagedRows) -> list[Tensor]:
    """Each row's own slots, int64, of its last positions; empty for rows of chains."""
    if rows.paths is None:
        return [rows.positions[:0].long()] * len(rows.positions)
    slots, starts = rows.paths.slots.long(), rows.paths.starts.tolist()
    return [slots[start:end] for start, end in zip(starts, starts[1:], strict=False)]


def _gather(key_cache: Tensor, value_cache: Tensor, page_ids: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [H, D, 256] and values [H, 256, E] of one chunk's slots [256] in float32; slots without a page are 0."""
    page_size = key_cache.shape[1]
    index = slots // page_size
    known = index < len(page_ids)
    pages = page_ids[index.clamp(max=len(page_ids) - 1)].long()
    offsets = slots % page_size
    keys = key_cache[pages, offsets].float().masked_fill(~known[:, None, None], 0.0)
    values = value_cache[pages, offsets].float().masked_fill(~known[:, None, None], 0.0)
    return keys.permute(1, 2, 0).contiguous(), values.permute(1, 0, 2).contiguous()


def _chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: int,
    first: int,
    last: int,
    softcap: float,
    slopes: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum [H, G, 1], sum [H, G, 1] and weighted values [H, G, E] of one row over one chunk's keys [first, last]."""
    scores = torch.bmm(query.reshape(keys.shape[0], -1, keys.shape[1]), keys)  # [H, G, 256]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    positions = torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE, device=query.device)
    if slopes is not None:
        scores = scores + slopes.float().reshape(*scores.shape[:2], 1) * (positions - last)
    scores = scores.masked_fill((positions < first) | (positions > last), float("-inf"))
    maximum = scores.amax(dim=-1, keepdim=True)
    weights = torch.exp(scores - maximum)
    return maximum, weights.sum(dim=-1, keepdim=True), torch.bmm(weights, values)


def _combine(
    earlier: tuple[Tensor, Tensor, Tensor], later: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    maximum = torch.maximum(earlier[0], later[0])
    old, new = torch.exp(earlier[0] - maximum), torch.exp(later[0] - maximum)
    return maximum, earlier[1] * old + later[1] * new, earlier[2] * old + later[2] * new
