"""Calls recorded as CUDA graphs: launched again as a whole, over the same memory, without Python in between."""

from collections.abc import Callable
from typing import Protocol

import torch


class Recorder(Protocol):
    """Records calls; all recordings share one pool of memory, so record the largest first."""

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Return what runs the call again."""
        ...


class GraphRecorder:
    """Records on the current CUDA device."""

    _NUM_WARM_UP = 2  # compiles kernels, creates library handles: neither may happen inside a recording

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # One for all: memory that was freed on a stream serves that stream only, also within a pool.
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """See `Recorder.record`."""
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(self._NUM_WARM_UP):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of a service may use the device meanwhile: their calls do not end this recording.
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            call()
        replay: Callable[[], None] = graph.replay
        return replay
