"""Session of a request with `n` > 1: several answers over as many streams as it takes.

The first stream brings all of them; after a break each is resumed alone, one after the other. Does no input or output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from betoken.client.completion import Completion
from betoken.client.piece import Piece
from betoken.client.retry import Retries
from betoken.client.session import Session
from betoken.common.errors import BetokenError, InternalError
from betoken.common.seeds import derived_seed
from betoken.v1 import generation_pb2 as pb


class ParallelSession(Session):
    """The state of `request.n` answers. What is asked of it as of one is the first one's."""

    def __init__(self, request: pb.GenerateRequest, retries: Retries, headers: Mapping[str, str]) -> None:
        super().__init__(request, retries, headers)
        self._answers = [Session(request, retries, headers) for _ in range(request.n)]
        self._pieces, self._of_prompt = self._answers[0]._pieces, self._answers[0]._of_prompt
        for answer in self._answers:
            answer._of_prompt = self._of_prompt  # the first answer's stream reports it for all
        self._resumed: int | None = None
        """Which of them the stream under way brings; None = all."""

    def next_request(self) -> tuple[pb.GenerateRequest, float | None]:
        if self.start is None:
            return super().next_request()
        self._resumed = next(index for index, answer in enumerate(self._answers) if not answer.is_finished)
        answer = self._answers[self._resumed]
        if answer.start is not None:
            request, timeout_s = answer.next_request()
        else:  # its stream had not begun
            request, timeout_s = super().next_request()
            request.sampling.seed = derived_seed(self.start.seed, self._resumed)
            del request.resume_ids[:]
        request.ClearField("n")
        return request, timeout_s

    def feed(self, response: pb.GenerateResponse) -> Piece | None:
        index = response.answer if self._resumed is None else self._resumed
        if index >= len(self._answers):
            raise InternalError(f"the router sent an event of answer {index}", request_id=self._request_id)
        piece = self._answers[index].feed(response)
        self.start = self._answers[0].start
        self._request_id = self._answers[index]._request_id
        return replace(piece, answer=index) if piece is not None else None

    @property
    def is_finished(self) -> bool:
        return all(answer.is_finished for answer in self._answers)

    def delay_after(self, error: BetokenError | None) -> float:
        if error is None and self._resumed is not None and self._answers[self._resumed].is_finished:
            return 0.0  # the next one's turn
        return super().delay_after(error)

    def completion(self) -> Completion:
        return self._answers[0].completion()

    @property
    def parts(self) -> list[Session]:
        return self._answers
