"""A router in this process with responses queued by the test: for tests of programs that use the SDK.

Speaks the public service over real gRPC. It knows no model: every text given is one message with one token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import grpc

from betoken.common.errors import BetokenError, UnimplementedError, to_status
from betoken.v1 import generation_pb2 as pb
from betoken.v1.generation_pb2_grpc import GenerationServiceServicer, add_GenerationServiceServicer_to_server
from betoken.v1.types_pb2 import TOKEN_ORIGIN_PLAIN

_THREADS = 8


@dataclass(frozen=True, slots=True)
class _Answer:
    texts: Sequence[str]
    error: BetokenError | None


class FakeRouter(GenerationServiceServicer):
    """Answers calls of `Generate` in the order of `answer` and `fail`. A context manager; other calls are refused."""

    def __init__(self, model: str = "fake") -> None:
        self.model = model
        self.requests: list[pb.GenerateRequest] = []
        """Every request that came, in order."""
        self._answers: deque[_Answer] = deque()
        self._server = grpc.server(ThreadPoolExecutor(_THREADS))
        add_GenerationServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"

    def answer(self, *texts: str) -> None:
        """The next unanswered call gets these texts, then its end."""
        self._answers.append(_Answer(texts, None))

    def fail(self, error: BetokenError, *texts: str) -> None:
        """The next unanswered call gets these texts, then `error`."""
        self._answers.append(_Answer(texts, error))

    def Generate(self, request: pb.GenerateRequest, context: Any) -> Iterator[pb.GenerateResponse]:  # noqa: N802 (gRPC)
        """Stream what is queued; token ids count up from those to resume after."""
        self.requests.append(request)
        given = self._answers.popleft() if self._answers else _Answer((), UnimplementedError("no answer is queued"))
        num_before, texts = len(request.resume_ids), given.texts
        yield pb.GenerateResponse(start=self._start(request))
        for index, text in enumerate(texts):
            token = pb.GeneratedToken(id=num_before + index, origin=TOKEN_ORIGIN_PLAIN, num_chars=len(text))
            yield pb.GenerateResponse(tokens=pb.GenerateTokens(tokens=[token], text=text))
        if given.error is not None:
            code, details, metadata = to_status(given.error)
            context.set_trailing_metadata(metadata)
            context.abort(code, details)
        usage = pb.Usage(output_tokens=num_before + len(texts))
        yield pb.GenerateResponse(finish=pb.GenerateFinish(reason=pb.FINISH_REASON_STOP, usage=usage))

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.stop(None).wait()

    def _start(self, request: pb.GenerateRequest) -> pb.GenerateStart:
        number = str(len(self.requests))
        return pb.GenerateStart(
            prompt_ids=request.prompt_ids.ids or [1],
            seed=request.sampling.seed,
            model=self.model,
            request_id=f"fake-{number}",
            system_fingerprint=self.model,
        )
