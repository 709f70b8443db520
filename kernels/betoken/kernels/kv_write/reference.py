"""Reference of the KV write in torch."""

import torch
from torch import Tensor

from betoken.kernels.rows import PagedRows


def kv_write_reference(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows) -> None:
    """See `betoken.kernels.kv_write.kv_write`."""
    page_size = key_cache.shape[1]
    slots = rows.own_slots()
    page_index = rows.page_starts[rows.row_segments.long()] + slots // page_size
    pages = rows.page_ids[page_index.long()].long()
    offsets = (slots % page_size).long()
    is_bad = ~value.isfinite().all(dim=2, keepdim=True)
    key_cache[pages, offsets] = key.masked_fill(is_bad, torch.nan)
    value_cache[pages, offsets] = value.masked_fill(is_bad, 0.0)
