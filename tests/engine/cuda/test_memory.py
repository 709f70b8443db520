"""The arithmetic of the KV pool's size, and what a measurement reads."""

import pytest
import torch

from betoken.engine.cuda.memory import MemoryUse, count_pages, measure_forward
from betoken.engine.errors import ModelRefusedError

GIB = 1 << 30


def test_kv_takes_its_fraction_of_what_forward_and_graphs_leave() -> None:
    use = MemoryUse(free_bytes=10 * GIB, forward_bytes=2 * GIB)
    assert count_pages(use, 0.5, page_bytes=GIB // 4, page_size=16, max_context=64) == 4 * 4 - 1  # one is for padding
    assert count_pages(use, 1.0, page_bytes=GIB // 4, page_size=16, max_context=64) == 8 * 4 - 1
    assert count_pages(use, 1.0, page_bytes=3, page_size=16, max_context=64) == 8 * GIB // 3 - 1


@pytest.mark.parametrize("forward_bytes", [6 * GIB, 10 * GIB, 20 * GIB])
def test_too_little_memory_for_one_sequence_is_refused(forward_bytes: int) -> None:
    use = MemoryUse(free_bytes=10 * GIB, forward_bytes=forward_bytes)
    with pytest.raises(ModelRefusedError, match="max_context needs 4096"):
        count_pages(use, 0.9, page_bytes=GIB // 16, page_size=16, max_context=4096)
    assert count_pages(MemoryUse(257, 0), 1.0, page_bytes=1, page_size=16, max_context=4096) == 256


def test_a_memory_measurement_brackets_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []
    fakes = {
        "synchronize": lambda device: steps.append("wait"),
        "empty_cache": lambda: steps.append("empty"),
        "reset_peak_memory_stats": lambda device: steps.append("reset"),
        "memory_allocated": lambda device: 100,
        "max_memory_allocated": lambda device: 170,
        "mem_get_info": lambda device: (steps.append("ask"), (5000, 9000))[1],
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    use = measure_forward(lambda: steps.append("run"), torch.device("cuda"))
    assert steps == ["wait", "empty", "reset", "run", "wait", "ask"]
    assert use == MemoryUse(free_bytes=5000, forward_bytes=70)
