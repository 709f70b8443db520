"""How long the device takes for a call: replayed as a graph, so that launches cost nothing, with a cold L2 cache."""

from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch

from betoken.engine.cuda.graphs import GraphRecorder

_NUM_WARM_UP, _NUM_TIMED = 5, 50
_COPY_BYTES = 2 << 30


class Timer(Protocol):
    """Measures calls."""

    def time_ms(self, call: Callable[[], object], is_recordable: bool = True) -> float:
        """Median time of a call, milliseconds; a call that synchronises with the host cannot be recorded."""
        ...

    def copy_bytes_per_s(self) -> float:
        """Bytes per second of a large copy, read and written together."""
        ...


class DeviceTimer:
    """Times on a CUDA device with events; before each call twice the L2 cache is overwritten."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
        self._flushed = torch.empty(num_bytes, dtype=torch.int8, device=device)

    def time_ms(self, call: Callable[[], object], is_recordable: bool = True) -> float:
        """See `Timer.time_ms`."""

        def run() -> None:
            call()

        replay = GraphRecorder().record(run) if is_recordable else run
        durations = []
        for index in range(_NUM_WARM_UP + _NUM_TIMED):
            self._flushed.fill_(index % 100)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            replay()
            end.record()
            end.synchronize()
            durations.append(start.elapsed_time(end))
        return float(median(durations[_NUM_WARM_UP:]))

    def copy_bytes_per_s(self) -> float:
        """See `Timer.copy_bytes_per_s`; random bytes, since zeros can be faster."""
        source = torch.randint(-128, 128, (_COPY_BYTES,), dtype=torch.int8, device=self._device)
        target = torch.empty_like(source)
        return 2 * _COPY_BYTES / (self.time_ms(lambda: target.copy_(source)) / 1000)
