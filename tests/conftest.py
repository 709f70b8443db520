"""Fakes shared by the tests of both workers, and the clock and the spans of all."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.clock import CLOCK, Clock
from tests.fork_server import ForkedPopen

# What is imported and collected stays. Searching it for garbage took two fifths of the time until the first test.
gc.disable()
CLOCK.install()
if sys.platform == "linux":
    subprocess.Popen = ForkedPopen  # type: ignore[misc]
# A background shell ignores SIGINT, and services under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
# An example slowed down by a machine pause is not a fault. Every run has the same examples, so that a failing one
# is the change's; `--hypothesis-profile=search` looks for others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", settings.get_profile("search"), derandomize=True)
settings.load_profile("tests")
# Read when torch is imported. Its threads spin otherwise, which blocks services on two cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Services under test are this machine's own.
os.environ["no_grpc_proxy"] = "127.0.0.1,localhost"
# gRPC's threads write of connections that tests break when pytest is past the test, between the dots. gRPC reads this
# once; services under test do not inherit it.
VERBOSITY = os.environ.get("GRPC_VERBOSITY")
os.environ["GRPC_VERBOSITY"] = VERBOSITY or "NONE"

import grpc  # noqa: E402
import torch  # noqa: E402

grpc.insecure_channel("127.0.0.1:1").close()
if VERBOSITY is None:
    del os.environ["GRPC_VERBOSITY"]


LONG = ("e2e", "deploy", "kernels", "engine", "verify_worker", "lab", "drafters", "client", "gateway")
"""Folders with files that take long. They come first where several processes share the files, or at the end one would
wait for another's; pytest-xdist goes by the number of tests."""


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        places = {folder: place for place, folder in enumerate(LONG)}
        root = Path(__file__).parent
        items.sort(key=lambda item: places.get(item.path.relative_to(root).parts[0], len(LONG)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    # Models are tiny, so that more threads spin for each other. Tests of several threads set their number.
    torch.set_num_threads(1)
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


class FakeRunner:
    """A deterministic language model over ids whose KV is the ids themselves, kept in paged slots.

    The next token is a hash of the context as read back through the page table, so that a wrong page, a wrong length or
    a missing prefill changes the tokens.
    """

    vocab_size = 97
    max_in_flight = 1

    def __init__(self, num_pages: int = 64, page_size: int = 4, max_context: int = 256, salt: int = 0) -> None:
        from betoken.engine.page_table import PageTable

        self.page_table = PageTable(num_pages, page_size, prefix_caching=True)
        self.info = SimpleNamespace(vocab_size=self.vocab_size, max_context=max_context)
        self.slots = [-1] * (num_pages * page_size)
        self.salt = salt
        self.forwards: list[int] = []
        self.fail_next = False
        self.yields_features = False
        """Whether forwards yield features [R, 1, 2]: each row's position, and the id at it."""

    def next_id(self, context: Sequence[int]) -> int:
        """The model's greedy token after `context`; a short window, so that guessing is possible."""
        value = self.salt
        for token_id in context[-3:]:
            value = (value * 31 + token_id + 7) % 1_000_003
        return value % self.vocab_size

    def complete(self, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(self.next_id(ids))
        return ids[len(prompt_ids) :]

    def forward(self, segments: Sequence) -> Any:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the device fell off")
        self.forwards.append(sum(len(segment.ids) for segment in segments))
        rows, features = [], []
        for segment in segments:
            parents = list(segment.parents or ())
            for offset, token_id in enumerate(segment.ids):
                self.slots[self._slot(segment.page_ids, segment.kv_length + offset)] = token_id
            length = segment.kv_length + len(segment.ids)
            context = self.held_ids(segment.page_ids, length)
            for row, token_id in enumerate(segment.ids):
                path = self._path(segment.kv_length + row, length - len(parents), parents)
                features.append(torch.tensor([[len(path) - 1, token_id]]))
            for row in range(len(segment.ids) - segment.num_logits, len(segment.ids)):
                logits = torch.zeros(self.vocab_size)
                path = self._path(segment.kv_length + row, length - len(parents), parents)
                logits[self.next_id([context[slot] for slot in path])] = 9.0
                rows.append(logits)
        from betoken.engine.forward import StepOutput

        logits = torch.stack(rows) if rows else torch.empty(0, self.vocab_size)
        return StepOutput(logits, torch.stack(features) if self.yields_features else None)

    def begin(self, segments: Sequence) -> Sequence:
        """A forward that `finish` runs, over the pages that sequences have now."""
        return [replace(segment, page_ids=list(segment.page_ids)) for segment in segments]

    def finish(self, begun: Sequence) -> Any:
        return self.forward(begun)

    def compact(self, paths: Sequence) -> None:
        for path in paths:
            for i, node in enumerate(path.nodes):
                source, target = (self._slot(path.page_ids, path.tree_start + place) for place in (node, i))
                self.slots[target] = self.slots[source]

    def held_ids(self, page_ids: Sequence[int], length: int) -> list[int]:
        """Content of the first `length` slots of these pages."""
        return [self.slots[self._slot(page_ids, position)] for position in range(length)]

    @staticmethod
    def _path(slot: int, tree_start: int, parents: list[int]) -> list[int]:
        """The slots that a row in `slot` sees, in order of position."""
        path: list[int] = []
        node = slot - tree_start
        while node >= 0:
            path.insert(0, tree_start + node)
            node = parents[node]
        return [*range(min(slot + 1, tree_start)), *path]

    def _slot(self, page_ids: Sequence[int], position: int) -> int:
        size = self.page_table.page_size
        return page_ids[position // size] * size + position % size


@pytest.fixture
def fake_runner_class() -> type[FakeRunner]:
    return FakeRunner


@pytest.fixture
def clock() -> Clock:
    """Clock of all timeouts of this process."""
    return CLOCK


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An OpenTelemetry exporter that keeps all spans ended from here on."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return exporter
