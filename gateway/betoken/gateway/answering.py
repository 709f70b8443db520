"""Asks a request's questions and sends what comes, whole or as server-sent events, until the client goes away.

Knows the SDK and ASGI; what a reply looks like is its form's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from betoken.client import AsyncGeneration, BetokenError, Completion, Piece
from betoken.gateway.door import Door, caller_headers
from betoken.gateway.errors import Failure, failure_of
from betoken.gateway.form import Form
from betoken.gateway.question import Question

_EVENT_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # or nginx would gather events
]
_DONE = b"data: [DONE]\n\n"
_ESCAPED_LINE_ENDS = {ord(char): f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"}
"""Line ends of Python's `str.splitlines`, at which clients such as httpx cut events. JSON has them in strings only."""


class Answers(Response):
    """The reply to `questions`, as many choices of each as answers are asked for.

    The first pieces of all answers come before any byte is sent, so that a refusal has its status in a stream, too.
    """

    def __init__(self, request: Request, form: Form, questions: Sequence[Question], *, is_stream: bool) -> None:
        """Raises:
        RefusedError: a key that cannot be passed on.
        InvalidArgumentError: a value that cannot be sent.
        """
        super().__init__()
        self._door = Door.of(request)
        self._caller = caller_headers(request)
        self._form = form
        self._questions = questions
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = _Events(send, self._form.names_events)
        await unless_gone(self._reply(scope, receive, events), receive)

    async def _reply(self, scope: Scope, receive: Receive, events: _Events) -> None:
        try:
            asked = [question.ask(self._door.client, self._caller) for question in self._questions]
            await self._learn_prompts(asked)
            if self._is_stream:
                await self._stream(asked, events)
                return
            answers = [answer for each in await _all([one.results() for one in asked]) for answer in each]
            for answer in answers:
                self._door.metrics.answered(answer)
            for one in asked:
                await self._learn_names(one, self._form.ids_of_prompt(one))
            await self._learn(asked[0], [token for answer in answers for token in answer.tokens])
            response: Response = JSONResponse(self._form.whole(answers))
        except BetokenError as error:
            failure = failure_of(error, self._questions[0].names)
            if events.is_begun:
                await events.end(failure)
                return
            response = JSONResponse(failure.body(), failure.status, failure.headers)
        await response(scope, receive, events.send)

    async def _stream(self, asked: Sequence[AsyncGeneration], events: _Events) -> None:
        form, turn = self._form, asyncio.Lock()
        silent = set(range(len(asked)))

        async def has_begun(number: int) -> None:
            silent.discard(number)
            if not silent:
                await events.release()

        async def follow(number: int) -> list[Completion]:
            generation, num = asked[number], self._questions[number].num_answers
            told, is_begun = _Reports(form, generation, number * num, num), False
            async with aclosing(aiter(generation)) as pieces:
                async for piece in pieces:
                    async with turn:
                        await has_begun(number)
                        if not is_begun:
                            is_begun = True
                            await self._learn_names(generation, form.ids_of_prompt(generation))
                        await self._learn(generation, piece.tokens)
                        for choice in told.choices(piece):
                            await events.put(generation, form, choice)
            answers = await generation.results()
            for answer in answers:
                self._door.metrics.answered(answer)
            async with turn:
                await has_begun(number)
                if not is_begun:
                    await self._learn_names(generation, form.ids_of_prompt(generation))
                for choice in told.choices():
                    await events.put(generation, form, choice)
            return answers

        answers = [answer for each in await _all([follow(number) for number in range(len(asked))]) for answer in each]
        if form.include_usage:
            await events.put_json(form.last_event(answers))
        await events.end()

    async def _learn(self, asked: AsyncGeneration, tokens: Sequence[Any]) -> None:
        """The bytes of reported tokens."""
        await self._learn_names(asked, self._form.ids_needed(asked.prompt_ids, tokens))

    async def _learn_names(self, asked: AsyncGeneration, ids: set[int]) -> None:
        if ids:
            names = await self._door.vocabulary.names(asked.system_fingerprint, ids, self._caller)
            self._form.names = names

    async def _learn_prompts(self, asked: Sequence[AsyncGeneration]) -> None:
        """The prompts' texts, if echoed."""
        if not self._form.echoes:
            return
        texts = []
        for question in self._questions:
            prompt: Any = question.prompt
            if not isinstance(prompt, str):
                prompt = (await self._door.client.detokenize(prompt, headers=self._caller)).text
            texts.append(prompt)
        self._form.prompts = texts


class _Reports:
    """The messages so far of the answers to one prompt."""

    def __init__(self, form: Form, generation: AsyncGeneration, first: int, num: int) -> None:
        """`first`: index of the choice that its first answer is."""
        self._form = form
        self._generation = generation
        self._first = first
        self._begun = [False] * num
        self._ended = [False] * num

    def choices(self, piece: Piece | None = None) -> Iterator[dict[str, Any] | None]:
        """The events of a piece, and the ends of answers that are whole by now."""
        form = self._form
        if piece is not None:
            yield from self._begin(piece.answer)
            yield form.delta(self._first + piece.answer, piece)
        for index, has_ended in enumerate(self._ended):
            answer = None if has_ended else self._generation.completed(index)
            if answer is not None:
                self._ended[index] = True
                yield from self._begin(index)
                yield form.ending(self._first + index, answer)

    def _begin(self, index: int) -> Iterator[dict[str, Any] | None]:
        if not self._begun[index]:
            self._begun[index] = True
            yield self._form.opening(self._first + index, self._generation, self._generation.seed_of(index))


class _Events:
    """A stream of server-sent events. Withheld until all prompts' answers have begun: one may still be rejected."""

    def __init__(self, send: Send, are_named: bool) -> None:
        self.send = send
        self._are_named = are_named
        self._held: list[bytes] | None = []
        self.is_begun = False

    async def release(self) -> None:
        """Send what is held, and from here on what is put."""
        held, self._held = self._held, None
        if held:
            await self._put(b"".join(held))

    async def put(self, asked: AsyncGeneration, form: Form, choice: dict[str, Any] | None) -> None:
        if choice is not None:
            for event in form.events(asked, choice):
                await self.put_json(event)

    async def put_json(self, event: dict[str, Any]) -> None:
        text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
        name = f"event: {event['type']}\n" if self._are_named and "type" in event else ""
        await self._put(f"{name}data: {text.translate(_ESCAPED_LINE_ENDS)}\n\n".encode())

    async def end(self, failure: Failure | None = None) -> None:
        """Sends the error; a stream that ends so has no [DONE]."""
        if failure is not None:
            await self.put_json(failure.body())
        elif not self._are_named:
            await self._put(_DONE)
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _put(self, data: bytes) -> None:
        if self._held is not None:
            self._held.append(data)
            return
        if not self.is_begun:
            self.is_begun = True
            await self.send({"type": "http.response.start", "status": 200, "headers": _EVENT_HEADERS})
        await self.send({"type": "http.response.body", "body": data, "more_body": True})


async def _all(works: Sequence[Coroutine[Any, Any, list[Completion]]]) -> list[list[Completion]]:
    """Their results; the first error ends the others.

    Raises:
        BetokenError: one failed.
    """
    if len(works) == 1:
        return [await works[0]]
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(work) for work in works]
    except* BetokenError as group:
        error = next(_leaves(group))
        raise error from None
    return [task.result() for task in running]


def _leaves(group: BaseExceptionGroup[Any]) -> Any:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


async def unless_gone(work: Coroutine[Any, Any, None], receive: Receive) -> None:
    """`work` to its end, or until the client goes away; whatever it raises."""
    failure: Exception | None = None

    async def guarded() -> None:
        nonlocal failure
        try:
            await work
        except Exception as error:  # raised below: a TaskGroup would wrap it
            failure = error

    async with asyncio.TaskGroup() as tasks:
        working = tasks.create_task(guarded())
        leaving = tasks.create_task(_gone(receive))
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        working.cancel()
        leaving.cancel()
    if failure is not None:
        raise failure


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
