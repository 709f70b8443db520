"""Gathers in shared memory: every process gets every tensor of every turn, whoever is late."""

import ctypes
import random
import threading
import time

import pytest
import torch

from betoken.kernels.shared_gather import SharedGather, is_available, num_bytes

pytestmark = pytest.mark.skipif(not is_available(), reason="no C compiler")


def memory_of(size: int) -> tuple[ctypes.Array, int]:
    memory = ctypes.create_string_buffer(num_bytes(size) + 64)
    return memory, -(-ctypes.addressof(memory) // 64) * 64


@pytest.mark.parametrize("size", [1, 2, 4])
def test_each_rank_gets_the_tensors_of_all_ranks_in_their_order(size: int) -> None:
    memory, address = memory_of(size)
    lengths = [random.Random(turn).choice([1, 63, 64, 3072, 100_000]) for turn in range(200)]
    wrong: list[tuple[int, int]] = []

    def run(rank: int) -> None:
        shared, rng = SharedGather(address, rank, size), random.Random(rank)
        for turn, length in enumerate(lengths):
            source = torch.full((length,), (7 * turn + rank) % 251, dtype=torch.uint8)
            out = torch.empty(size, length, dtype=torch.uint8)
            if rng.random() < 0.02:
                time.sleep(0.001)
            shared.begin()
            while not shared.try_gather(source, out):
                pass
            if not all(bool((out[other] == (7 * turn + other) % 251).all()) for other in range(size)):
                wrong.append((rank, turn))

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong and not any(thread.is_alive() for thread in threads)
    del memory


def test_a_gather_without_the_other_rank_returns_and_can_be_repeated() -> None:
    memory, address = memory_of(2)
    first, second = (SharedGather(address, rank, 2) for rank in range(2))
    one, two = torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)
    out = torch.zeros(2, dtype=torch.uint8)
    first.begin()
    assert not first.try_gather(one, out)
    second.begin()
    assert second.try_gather(two, out.clone()) and first.try_gather(one, out)
    assert out.tolist() == [1, 2]
    del memory
