"""Reference of the paged attention in torch: plain, slow, and the same for every row whatever its neighbours."""

import torch
from torch import Tensor

from foretoken.kernels.rows import PagedRows

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
) -> Tensor:
    """See `foretoken.kernels.attention.attention`."""
    num_rows, num_heads, _ = query.shape
    out = torch.empty(num_rows, num_heads, value_cache.shape[3], dtype=query.dtype, device=query.device)
    starts = rows.page_starts.tolist()
    segments = rows.row_segments.tolist()
    gathered: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (sequence, chunk) -> keys, values in float32
    for row, position in enumerate(rows.positions.tolist()):
        page_ids = rows.page_ids[starts[segments[row]] : starts[segments[row] + 1]]
        first = max(0, position - window + 1) if window else 0
        running = None
        for chunk in range(first // CHUNK_SIZE, position // CHUNK_SIZE + 1):
            place = (segments[row], chunk)
            if place not in gathered:
                gathered[place] = _gather(key_cache, value_cache, page_ids, chunk)
            part = _chunk(query[row].float() * scale, *gathered[place], chunk, first, position, softcap)
            running = part if running is None else _combine(running, part)
        assert running is not None  # position // CHUNK_SIZE is always visited
        out[row] = (running[2] / running[1]).reshape(num_heads, -1).to(out.dtype)
    return out


def _gather(key_cache: Tensor, value_cache: Tensor, page_ids: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Keys [H, D, 256] and values [H, 256, E] of one chunk in float32; slots without a page are 0."""
    page_size = key_cache.shape[1]
    positions = torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE, device=page_ids.device)
    index = positions // page_size
    known = index < len(page_ids)
    pages = page_ids[index.clamp(max=len(page_ids) - 1)].long()
    offsets = positions % page_size
    keys = key_cache[pages, offsets].float().masked_fill(~known[:, None, None], 0.0)
    values = value_cache[pages, offsets].float().masked_fill(~known[:, None, None], 0.0)
    return keys.permute(1, 2, 0).contiguous(), values.permute(1, 0, 2).contiguous()


def _chunk(
    query: Tensor, keys: Tensor, values: Tensor, chunk: int, first: int, last: int, softcap: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Maximum [H, G, 1], sum [H, G, 1] and weighted values [H, G, E] of one row over one chunk's keys [first, last]."""
    scores = torch.bmm(query.reshape(keys.shape[0], -1, keys.shape[1]), keys)  # [H, G, 256]
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    positions = torch.arange(chunk * CHUNK_SIZE, (chunk + 1) * CHUNK_SIZE, device=query.device)
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
