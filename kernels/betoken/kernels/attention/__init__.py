"""Attention of a flat ragged batch, chains and trees, over paged keys and values. It knows no models or sequences."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from betoken.kernels import dispatch
from betoken.kernels.attention.reference import CHUNK_SIZE, attention_reference
from betoken.kernels.cpu import CPU_DTYPES, load_cpu_kernels
from betoken.kernels.rows import PagedRows

__all__ = ["CHUNK_SIZE", "attention", "attention_native", "attention_reference"]

_TRITON = dispatch.triton("betoken.kernels.attention.kernel", "attention_triton")


def attention(
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
    """Attend row r to positions [max(0, pos - window + 1), pos] along its path.

    A row's result depends on its own query, position and keys only: the reduction runs in float32 over fixed chunks of
    256 absolute positions, in order, so neither the number of rows nor their neighbours change a bit of it. Keys are
    found by position, in any slot, so a node of a tree has the bits of the same path decoded as a chain.

    Args:
        query: [R, Hq, D]; head h reads key head h // (Hq // H).
        key_cache: [num_pages, page_size, H, D], value_cache: [num_pages, page_size, H, E].
        rows: positions and slots of the rows and their keys.
        scale: factor on the scores.
        window: number of visible positions, 0 for all.
        softcap: scores become softcap * tanh(scores / softcap); 0 for none.
        sinks: [Hq], any float type, taken as float32: a learned score per query head that takes part in each row's
            softmax, after its keys, and carries no value. Neither `scale` nor `softcap` applies to it.
        span: positions are cut into spans of this many; a row attends only to keys of its span. 0 for no cuts.
        slopes: [Hq], any float type, taken as float32: a key's score falls by its head's slope with every position
            between it and the row (ALiBi); after `scale` and `softcap`.

    Returns:
        [R, Hq, E], dtype of `query`.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.

    Source:
        Sinks as learned logits in the softmax's denominator: gpt-oss model card, arXiv:2508.10925; what they replace:
        Xiao et al., arXiv:2309.17453. ALiBi: Press et al., arXiv:2108.12409.
    """
    _check(query, key_cache, value_cache, rows, {"sinks": sinks, "slopes": slopes})
    table: dict[dispatch.PathName, Callable[..., Tensor]] = {"reference": attention_reference, "triton": _TRITON}
    if query.device.type == "cpu" and query.dtype in CPU_DTYPES and load_cpu_kernels() is not None:
        table["native"] = attention_native
    _, implementation = dispatch.select(query.device, table)
    return implementation(
        query,
        key_cache,
        value_cache,
        rows,
        scale=scale,
        window=window,
        softcap=softcap,
        sinks=sinks,
        span=span,
        slopes=slopes,
    )


def attention_native(
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
    """`attention` by the CPU kernels, which must have been loaded."""
    out: Tensor = torch.ops.betoken.paged_attention(
        query,
        key_cache,
        value_cache,
        rows.positions,
        rows.row_segments,
        rows.page_starts,
        rows.page_ids,
        None if rows.paths is None else rows.paths.starts,
        None if rows.paths is None else rows.paths.slots,
        scale,
        window,
        softcap,
        sinks,
        span,
        slopes,
    )
    return out


def _check(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows, by_head: Mapping[str, Tensor | None]
) -> None:
    if query.dim() != 3 or key_cache.dim() != 4 or value_cache.dim() != 4:
        raise ValueError(
            f"query must be [R, Hq, D] and caches [pages, page_size, H, size], got {tuple(query.shape)},"
            f" {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if query.shape[2] != key_cache.shape[3] or query.shape[1] % key_cache.shape[2]:
        raise ValueError(f"query {tuple(query.shape)} does not fit keys {tuple(key_cache.shape)}")
    if key_cache.shape[:3] != value_cache.shape[:3] or not key_cache.is_contiguous() or not value_cache.is_contiguous():
        raise ValueError(f"keys {tuple(key_cache.shape)} and values {tuple(value_cache.shape)} must be dense and alike")
    if not query.dtype == key_cache.dtype == value_cache.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key_cache.dtype}, {value_cache.dtype}")
    if len(rows.positions) != len(query):
        raise ValueError(f"{len(query)} queries, {len(rows.positions)} positions")
    for name, given in by_head.items():
        if given is not None and (given.shape != query.shape[1:2] or not given.is_floating_point()):
            raise ValueError(
                f"{name} {tuple(given.shape)} {given.dtype} must be a float for each of {query.shape[1]} heads"
            )
