"""The KV compaction in Triton: one program a group and head walks the group's moves in order."""

import triton
import triton.language as tl
from torch import Tensor


def kv_compact_triton(key_cache: Tensor, value_cache: Tensor, sources: Tensor, targets: Tensor, starts: Tensor) -> None:
    """See `betoken.kernels.kv_compact.kv_compact`."""
    num_groups, num_heads = len(starts) - 1, key_cache.shape[2]
    key_size, value_size = key_cache.shape[3], value_cache.shape[3]
    if num_groups == 0:
        return
    _compact[(num_groups, num_heads)](
        key_cache,
        value_cache,
        sources,
        targets,
        starts,
        NUM_HEADS=num_heads,
        KEY_SIZE=key_size,
        VALUE_SIZE=value_size,
        BLOCK=triton.next_power_of_2(max(key_size, value_size)),
        num_warps=1,
    )


@triton.jit
def _compact(
    key_cache,  # [slots, H, D]
    value_cache,  # [slots, H, E]
    sources,  # [M]
    targets,  # [M]
    starts,  # [G + 1]
    NUM_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    group = tl.program_id(0)
    head = tl.program_id(1)
    at = tl.arange(0, BLOCK)
    for move in range(tl.load(starts + group), tl.load(starts + group + 1)):
        source = tl.load(sources + move) * NUM_HEADS + head
        target = tl.load(targets + move) * NUM_HEADS + head
        key = tl.load(key_cache + source * KEY_SIZE + at, mask=at < KEY_SIZE)
        value = tl.load(value_cache + source * VALUE_SIZE + at, mask=at < VALUE_SIZE)
        tl.debug_barrier()  # a target may be the source of the move before
        tl.store(key_cache + target * KEY_SIZE + at, key, mask=at < KEY_SIZE)
        tl.store(value_cache + target * VALUE_SIZE + at, value, mask=at < VALUE_SIZE)
