"""A strict router in this process: it answers from a queue of scripts and fails the test that leaves one unused."""

import os
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from betoken.cli import local_services
from betoken.common.errors import BetokenError, to_status
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import generation_pb2_grpc, types_pb2
from tests.client.runners import AsyncRunner, SyncRunner


class Hang:
    """A script step: wait until the client goes away."""


class EndEarly:
    """A script step: end the stream as if all was well."""


Step = Message | BetokenError | grpc.StatusCode | Hang | EndEarly


def start(seed: int = 7, prompt_ids: Sequence[int] = (1, 2, 3), **fields: object) -> pb.GenerateResponse:
    values = {"seed": seed, "prompt_ids": prompt_ids, "model": "tiny", "request_id": "r1", "drafter": "model"} | fields
    return pb.GenerateResponse(start=pb.GenerateStart(**values))


def tokens(text: str, *ids: int, origin: int = types_pb2.TOKEN_ORIGIN_PLAIN, source: str = "") -> pb.GenerateResponse:
    """One message whose text is shared evenly by its tokens, the rest falling to the last."""
    share = len(text) // len(ids) if ids else 0
    entries = [pb.GeneratedToken(id=id_, origin=origin, source=source, num_chars=share) for id_ in ids]
    return pb.GenerateResponse(tokens=pb.GenerateTokens(tokens=entries, text=text))


def of_prompt(first_position: int, *logprobs: float) -> pb.GenerateResponse:
    """Logprobs of the prompt; each token's likeliest id is its position."""
    told = pb.GeneratePromptLogprobs(first_position=first_position)
    for position, logprob in enumerate(logprobs, first_position):
        told.logprobs.add(logprob=logprob, top_ids=[position], top_logprobs=[-0.25])
    return pb.GenerateResponse(prompt_logprobs=told)


def finish(num_output: int = 0, reason: int = pb.FINISH_REASON_LENGTH, **fields: object) -> pb.GenerateResponse:
    usage = pb.Usage(prompt_tokens=3, output_tokens=num_output)
    return pb.GenerateResponse(finish=pb.GenerateFinish(reason=reason, usage=usage, **fields))


@dataclass
class FakeRouter(generation_pb2_grpc.GenerationServiceServicer):
    """Queue scripts with `will`; read what was asked from `requests` and `metadata`."""

    requests: list[Message] = field(default_factory=list)
    metadata: list[dict[str, str]] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""
    has_chat_template: bool | None = False
    """Reported to calls of `GetModelInfo` with `at_once`, unless an answer is queued; None = every call is scripted."""
    _scripts: deque[tuple[Step, ...]] = field(default_factory=deque)
    _faults: list[str] = field(default_factory=list)

    def will(self, *steps: Step) -> None:
        """Queue the answer to one call."""
        self._scripts.append(steps)

    def check(self) -> None:
        """Raises AssertionError if a call was not expected or an expected one did not come."""
        assert not self._faults, self._faults
        assert not self._scripts, f"{len(self._scripts)} queued replies were not consumed: {list(self._scripts)}"

    def Generate(self, request: Message, context: grpc.ServicerContext) -> Iterator[Message]:
        ended = threading.Event()
        context.add_callback(lambda: ended.is_set() or self.cancelled.set())
        steps = self._next(request, context)
        for step in steps:
            if step is steps[-1] and not isinstance(step, Hang):
                ended.set()
            if isinstance(step, Message):
                yield step
            elif isinstance(step, EndEarly):
                return
            else:
                self._fail(step, context)

    def GetModelInfo(self, request: Message, context: grpc.ServicerContext) -> Message:
        is_queued = self._scripts and isinstance(self._scripts[0][0], pb.GetModelInfoResponse)
        if request.at_once and not is_queued and self.has_chat_template is not None:
            return pb.GetModelInfoResponse(has_chat_template=self.has_chat_template)
        return self._unary(request, context)

    def Tokenize(self, request: Message, context: grpc.ServicerContext) -> Message:
        return self._unary(request, context)

    def Detokenize(self, request: Message, context: grpc.ServicerContext) -> Message:
        return self._unary(request, context)

    def _unary(self, request: Message, context: grpc.ServicerContext) -> Message:
        (step,) = self._next(request, context)
        return step if isinstance(step, Message) else self._fail(step, context)

    def _next(self, request: Message, context: grpc.ServicerContext) -> tuple[Step, ...]:
        self.requests.append(request)
        self.metadata.append({key: value for key, value in context.invocation_metadata()})
        if not self._scripts:
            self._faults.append(f"unexpected call: {request}")
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "no reply was queued")
        return self._scripts.popleft()

    def _fail(self, step: Step, context: grpc.ServicerContext) -> Message:
        if isinstance(step, BetokenError):
            code, details, metadata = to_status(step)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        if isinstance(step, grpc.StatusCode):
            context.abort(step, "as scripted")
        gone = threading.Event()
        if context.add_callback(gone.set):
            gone.wait(120)
        raise AssertionError("the client went away")


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    fake = FakeRouter()
    server = grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield fake
    server.stop(None)
    fake.check()


@pytest.fixture
def script() -> "type[Script]":
    return Script


class Script:
    """The vocabulary of scripts, handed to tests as a fixture."""

    start = staticmethod(start)
    tokens = staticmethod(tokens)
    of_prompt = staticmethod(of_prompt)
    finish = staticmethod(finish)
    Hang = Hang
    EndEarly = EndEarly


@pytest.fixture
def fake_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Services started as local processes are `fake_service`; returns a temporary directory."""
    roots = [str(Path(__file__).parent), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(roots))
    for name in ("VERIFY_MODULE", "DRAFT_MODULE", "ROUTER_MODULE", "GATEWAY_MODULE"):
        monkeypatch.setattr(local_services, name, "fake_service")
    return tmp_path


@pytest.fixture(params=[SyncRunner, AsyncRunner], ids=["sync", "async"])
def runner(request: pytest.FixtureRequest) -> Any:
    return request.param()
