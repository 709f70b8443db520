"""Where each row of a flat ragged batch lives in the paged KV cache. Shared by the attention and kv_write kernels."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(slots=True)
class PagedRows:
    """R rows of S sequences; sequence s owns pages `page_ids[page_starts[s] : page_starts[s + 1]]`.

    The key of position t of sequence s lies in page `page_ids[page_starts[s] + t // page_size]`, slot t % page_size.
    All tensors are int32 and lie on the device of the caches.
    """

    positions: Tensor  # [R], absolute position of the row's token
    row_segments: Tensor  # [R], ascending
    page_starts: Tensor  # [S + 1]
    page_ids: Tensor  # [number of pages of all sequences]
