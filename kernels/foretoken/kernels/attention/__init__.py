"""Causal attention of a flat ragged batch over paged keys and values. It does not know models or sequences."""

from torch import Tensor

from foretoken.kernels.attention.reference import CHUNK_SIZE, attention_reference
from foretoken.kernels.rows import PagedRows

__all__ = ["CHUNK_SIZE", "attention", "attention_reference"]


def attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PagedRows,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> Tensor:
    """Attend row r to positions [max(0, pos - window + 1), pos] of its own sequence.

    A row's result depends on its own query, position and keys only: the reduction runs in float32 over fixed chunks of
    256 absolute positions, in order, so neither the number of rows nor their neighbours change a bit of it.

    Args:
        query: [R, Hq, D]; head h reads key head h // (Hq // H).
        key_cache: [num_pages, page_size, H, D], value_cache: [num_pages, page_size, H, E].
        scale: factor on the scores.
        window: number of visible positions, 0 for all.
        softcap: scores become softcap * tanh(scores / softcap); 0 for none.

    Returns:
        [R, Hq, E], dtype of `query`.
    """
    return attention_reference(query, key_cache, value_cache, rows, scale=scale, window=window, softcap=softcap)
