"""Write the new keys and values of a flat ragged batch into their pages."""

from torch import Tensor

from foretoken.kernels.kv_write.reference import kv_write_reference
from foretoken.kernels.rows import PagedRows

__all__ = ["kv_write", "kv_write_reference"]


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows) -> None:
    """Store row r in its own slot.

    Args:
        key: [R, H, D], value: [R, H, E], the caches' dtype.
        key_cache: [num_pages, page_size, H, D], value_cache: [num_pages, page_size, H, E]; written in place.
        rows: where the rows live.
    """
    kv_write_reference(key, value, key_cache, value_cache, rows)
