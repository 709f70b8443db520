"""How calls are recorded, with a device made up: what torch is asked to record, where."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from betoken.engine.cuda.graphs import GraphRecorder


def test_recordings_share_memory_which_takes_one_pool_and_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings: list[tuple[object, object]] = []

    def graph(graph: object, pool: object, stream: object, capture_error_mode: str) -> Any:
        recordings.append((pool, stream))
        return nullcontext()

    def make_stream() -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    monkeypatch.setattr(torch.cuda, "Stream", make_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", make_stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    monkeypatch.setattr(torch.cuda, "graph", graph)
    recorder, calls = GraphRecorder(), []
    for number in range(3):
        recorder.record(lambda number=number: calls.append(number))
    assert calls == [0, 0, 0, 1, 1, 1, 2, 2, 2], "each compiles and settles before it is recorded"
    assert len(recordings) == 3 and all(kept == recordings[0] for kept in recordings)
