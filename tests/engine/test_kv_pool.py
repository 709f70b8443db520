"""The memory of a KV pool on a CPU."""

import psutil
import torch

from betoken.engine.kv_pool import KvPool, LayerShape

SHAPES = {layer: LayerShape(num_heads=2, key_size=64, value_size=32) for layer in range(2)}


def pool(num_pages: int) -> KvPool:
    return KvPool(SHAPES, num_pages, 16, torch.bfloat16, torch.device("cpu"))


def test_unwritten_slots_of_the_kv_pool_are_zero() -> None:
    made = pool(3)
    for layer in SHAPES:
        keys, values = made.keys[layer], made.values[layer]
        assert (keys.shape, values.shape) == ((3, 16, 2, 64), (3, 16, 2, 32))
        assert not keys.any() and not values.any()
        keys[1] = values[1] = 1.0
        assert keys.sum() == 16 * 2 * 64 and values.sum() == 16 * 2 * 32
        assert keys.data_ptr() % 64 == values.data_ptr() % 64 == 0, "vectors of the kernels do not cross cache lines"


def test_kv_pool_memory_is_taken_when_it_is_written() -> None:
    page_bytes = sum(shape.page_bytes(16, 2) for shape in SHAPES.values())
    num_pages = (512 << 20) // page_bytes
    before = psutil.Process().memory_info().rss
    made = pool(num_pages)
    assert psutil.Process().memory_info().rss - before < 64 << 20
    for layer in SHAPES:
        made.keys[layer].fill_(1.0)
    assert psutil.Process().memory_info().rss - before > 256 << 20
