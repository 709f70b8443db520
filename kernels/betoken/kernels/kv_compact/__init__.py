"""Move the keys and values of accepted tree paths to the slots of a chain."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from betoken.kernels import checks, dispatch
from betoken.kernels.kv_compact.reference import kv_compact_reference

__all__ = ["kv_compact", "kv_compact_layers", "kv_compact_reference"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., None]] = {
    "reference": kv_compact_reference,
    "triton": dispatch.triton("betoken.kernels.kv_compact.kernel", "kv_compact_triton"),
}


def kv_compact(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor, starts: Tensor) -> None:
    """Copy slot sources[i] to slot targets[i] for every i, in order within a group.

    Group g owns the moves [starts[g], starts[g + 1]); no group touches another's slots. Within a group sources and
    targets ascend in the sequence and no target comes after its source, so a move never destroys a later one's source.

    Args:
        key_cache: [num_pages, page_size, H, D], value_cache: [num_pages, page_size, H, E]; changed in place.
        sources, targets: [M] int64, slots of the pool: page * page_size + offset.
        starts: [G + 1] int64, from 0 to M, not decreasing.

    Raises:
        ValueError: a shape, stride, dtype or device other than above; on CPU also bad starts or slots.
    """
    kv_compact_layers([key_cache], [value_cache], sources, targets, starts)


def kv_compact_layers(
    key_caches: Sequence[Tensor], value_caches: Sequence[Tensor], sources: Tensor, targets: Tensor, starts: Tensor
) -> None:
    """Apply the moves in each of several layers with equally many slots; at least one layer.

    Raises:
        ValueError: as `kv_compact`.
    """
    pages, device = key_caches[0].shape[:2], key_caches[0].device
    for keys, values in zip(key_caches, value_caches, strict=True):
        is_dense = keys.is_contiguous() and values.is_contiguous()
        if keys.shape[:3] != values.shape[:3] or keys.shape[:2] != pages or not is_dense:
            raise ValueError(f"keys {list(keys.shape)} and values {list(values.shape)} must be dense and alike")
    for name, column, length in (("sources", sources, sources.numel()), ("targets", targets, sources.numel())):
        checks.check_column(name, column, length, torch.int64, device)
        checks.check_ids(name, column, pages.numel())
    checks.check_column("starts", starts, max(1, starts.numel()), torch.int64, device)
    checks.check_offsets("starts", starts, sources.numel())
    _, implementation = dispatch.select(device, IMPLEMENTATIONS)
    for keys, values in zip(key_caches, value_caches, strict=True):
        implementation(keys, values, sources, targets, starts)
