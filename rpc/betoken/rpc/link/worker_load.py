"""How sequences are named on a worker, and how busy it is: plain values. Knows no links and no models."""

from dataclasses import dataclass

from betoken.common.economy.memory_counts import MemoryCounts
from betoken.v1.types_pb2 import Load

SequenceKey = tuple[int, int]
"""(link id, sequence_id): sequence ids are unique within one link."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """Sequences at work, sequences waiting, KV pages, since the start preemptions and tokens found in the prefix cache,
    speed and price of a row, bytes of snapshots, the correction of measured step times, and the drafters' memory."""

    num_running: int
    num_waiting: int
    num_free_pages: int
    num_pages: int
    num_preemptions: int = 0
    tokens_per_s: float = 0.0
    row_price: float = 0.0
    num_cached_tokens: int = 0
    snapshot_bytes: int = 0
    step_time_ratio: float = 0.0
    memory: MemoryCounts = MemoryCounts()

    def to_message(self) -> Load:
        return Load(
            running=self.num_running,
            waiting=self.num_waiting,
            free_pages=self.num_free_pages,
            total_pages=self.num_pages,
            preemptions=self.num_preemptions,
            tokens_per_s=self.tokens_per_s,
            row_price=self.row_price,
            cached_tokens=self.num_cached_tokens,
            snapshot_bytes=self.snapshot_bytes,
            step_time_ratio=self.step_time_ratio,
            memory_documents=self.memory.num_documents,
            memory_tokens=self.memory.num_tokens,
            memory_hits=self.memory.num_hits,
            memory_evictions=self.memory.num_evicted,
        )
