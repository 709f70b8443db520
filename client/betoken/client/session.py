"""One answer over as many streams as it takes: what to ask next, and what each message means.

Both clients drive it and differ only in how they wait; it does no input or output itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from betoken.client.completion import Completion, PartialAnswer
from betoken.client.piece import Logprobs, Piece
from betoken.client.retry import Retries
from betoken.common.errors import BetokenError, InternalError, UnavailableError
from betoken.v1 import generation_pb2 as pb


class Session:
    """The state of one answer."""

    def __init__(self, request: pb.GenerateRequest, retries: Retries, headers: Mapping[str, str]) -> None:
        self._request = request
        self.headers = headers
        """The caller's own, of each stream."""
        self._retries = retries
        self._pieces: list[Piece] = []
        self._of_prompt: list[Logprobs] = []
        """Logprobs of the prompt's tokens but the first."""
        self._finish: pb.GenerateFinish | None = None
        self._num_resumes = 0
        self._is_begun = False
        self._error: BetokenError | None = None
        """Error that ended the iteration."""
        self._request_id = ""
        """Request id of the last stream whose first message came."""
        self.start: pb.GenerateStart | None = None
        """The first message of the first stream."""

    def begin(self) -> None:
        """The iteration is asked for.

        Raises:
            RuntimeError: it was before.
        """
        if self._is_begun:
            raise RuntimeError("an answer can be iterated only once")
        self._is_begun = True

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """From before the first stream is asked for, from which the deadline counts, to the end of the last.

        An error that ends it is kept, and is given the request's id and what came before it.
        """
        self._retries.begin()
        try:
            yield
        except BetokenError as error:
            error.request_id = error.request_id or self._request_id
            if self.start is not None:
                error.partial = PartialAnswer.from_proto(self.start, self._pieces)
            self._error = error
            raise

    def must_iterate(self) -> bool:
        """Whether the whole answer is still to be streamed.

        Raises:
            BetokenError: the iteration has ended with it.
            RuntimeError: the iteration was begun, and did not come to its end.
        """
        if self._error is not None:
            raise self._error
        if self._is_begun and not self.is_finished:
            raise RuntimeError(
                "this answer is not whole: its iteration was left early, which cancels the request, or is still under"
                " way; iterate to the end, or take result() alone"
            )
        return not self._is_begun

    def next_request(self) -> tuple[pb.GenerateRequest, float | None]:
        """The request of the next stream and the seconds it may take (None = no limit).

        After a break it continues from what was received: same prompt ids, system and seed, and `resume_ids`. The
        system says more than the model's name, which may be another on the next router.

        Raises:
            DeadlineExceededError: no time is left.
        """
        timeout_s = self._retries.remaining_s()
        if self.start is None:
            return self._request, timeout_s
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        request.prompt_ids.ids[:] = self.start.prompt_ids
        request.ClearField("add_special_tokens")
        if self.start.system_fingerprint:
            request.ClearField("model")
        request.system_fingerprint = self.start.system_fingerprint
        request.sampling.seed = self.start.seed
        request.resume_prompt_logprobs = len(self._of_prompt)
        request.resume_ids.extend(token.id for piece in self._pieces for token in piece.tokens)
        return request, timeout_s

    def feed(self, response: pb.GenerateResponse) -> Piece | None:
        """Takes one message; returns the piece it brought, if any.

        Raises:
            InternalError: the messages do not come in their order.
        """
        event = response.WhichOneof("event")
        if event == "start":
            self._num_resumes += self.start is not None
            self.start = self.start or response.start
            self._request_id = response.start.request_id
        elif self.start is None or self._finish is not None:
            raise InternalError(
                f"the router sent {event or 'an unknown event'} out of order", request_id=self._request_id
            )
        elif event == "prompt_logprobs":
            self._feed_prompt(response.prompt_logprobs)
        elif event == "tokens":
            piece = Piece.from_proto(response.tokens)
            self._pieces.append(piece)
            self._retries.progressed()
            return piece
        elif event == "finish":
            self._finish = response.finish
        return None

    def _feed_prompt(self, message: pb.GeneratePromptLogprobs) -> None:
        if message.first_position != 1 + len(self._of_prompt):
            at = message.first_position
            raise InternalError(
                f"the router sent position {at} of the prompt out of order", request_id=self._request_id
            )
        self._of_prompt += map(Logprobs.from_proto, message.logprobs)
        self._retries.progressed()

    @property
    def prompt_logprobs(self) -> tuple[Logprobs | None, ...]:
        """One per token of the prompt, the first None; empty where not all have come."""
        is_asked = self._request.sampling.HasField("prompt_logprobs")
        if not is_asked or self.start is None or len(self._of_prompt) != len(self.start.prompt_ids) - 1:
            return ()
        return (None, *self._of_prompt)

    @property
    def is_finished(self) -> bool:
        """Whether the last message came; nothing is worth asking for after it."""
        return self._finish is not None

    def delay_after(self, error: BetokenError | None) -> float:
        """Seconds to wait before asking again, after a stream broke with `error` (None = it just ended too early).

        Raises:
            BetokenError: `error`, when it is final. The errors of deadlines and lost routers have no request id of
                their own.
        """
        error = error or UnavailableError("the stream ended before the answer did")
        error.request_id = error.request_id or self._request_id
        return self._retries.delay_after(error)

    @property
    def parts(self) -> list[Session]:
        """The answers, each for itself."""
        return [self]

    def so_far(self) -> Completion | None:
        """The received part of the answer as a completion; None before the first message."""
        if self.start is None:
            return None
        num_output = len(self._request.resume_ids) + sum(len(piece.tokens) for piece in self._pieces)
        usage = pb.Usage(prompt_tokens=len(self.start.prompt_ids), output_tokens=num_output)
        finish = pb.GenerateFinish(reason=pb.FINISH_REASON_LENGTH, usage=usage)
        return Completion.from_proto(self.start, self._pieces, finish, self._num_resumes, self.prompt_logprobs)

    def completion(self) -> Completion:
        """The whole answer, once finished."""
        assert self.start is not None and self._finish is not None
        return Completion.from_proto(self.start, self._pieces, self._finish, self._num_resumes, self.prompt_logprobs)
