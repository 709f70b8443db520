"""Write the new keys and values of a flat ragged batch into their pages."""

from collections.abc import Callable

from torch import Tensor

from betoken.kernels import dispatch
from betoken.kernels.kv_write.reference import kv_write_reference
from betoken.kernels.rows import PagedRows

__all__ = ["kv_write", "kv_write_reference"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., None]] = {
    "reference": kv_write_reference,
    "triton": dispatch.triton("betoken.kernels.kv_write.kernel", "kv_write_triton"),
}


def kv_write(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, rows: PagedRows) -> None:
    """Store row r in its own slot. A head whose value is not finite is stored as key NaN, value 0.

    Rows that must not see a slot give it weight 0, which times NaN or infinity would be NaN in their sums; keys are
    masked before. A value that is not finite reaches the rows that see it, and no other.

    Args:
        key: [R, H, D], value: [R, H, E], the caches' dtype.
        key_cache: [num_pages, page_size, H, D], value_cache: [num_pages, page_size, H, E]; written in place.
        rows: slots of the rows; no two share a slot.

    Raises:
        ValueError: shapes or dtypes that do not fit each other.
    """
    for name, new, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if new.shape[1:] != cache.shape[2:] or new.dtype != cache.dtype or not cache.is_contiguous():
            raise ValueError(
                f"{name} {list(new.shape)} {new.dtype} does not fit a cache {list(cache.shape)} {cache.dtype}"
            )
        if len(new) != len(rows.positions):
            raise ValueError(f"{name} has {len(new)} rows, there are {len(rows.positions)} positions")
    if key_cache.shape[:2] != value_cache.shape[:2]:
        raise ValueError(f"caches {list(key_cache.shape)} and {list(value_cache.shape)} must have the same pages")
    _, implementation = dispatch.select(key.device, IMPLEMENTATIONS)
    implementation(key, value, key_cache, value_cache, rows)
