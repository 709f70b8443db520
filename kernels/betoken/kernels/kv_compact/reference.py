"""Reference of the KV compaction in torch."""

from torch import Tensor


def kv_compact_reference(
    key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor, starts: Tensor
) -> None:
    """See `betoken.kernels.kv_compact.kv_compact`. Reads all, then writes all, which is the same."""
    for cache in (key_cache, value_cache):
        slots = cache.flatten(0, 1)  # a view, also of values of size 0
        slots.index_copy_(0, targets, slots.index_select(0, sources))
