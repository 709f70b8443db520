"""Answers as OpenAI's `response` objects, whole and in events.

Knows no transport: `answering` asks and sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from betoken.client import AsyncGeneration, Completion, Piece, Token
from betoken.gateway.form import Form, choice_extension, piece_extension
from betoken.gateway.read_answer import TokenText, ids_to_read, parser_of
from betoken.gateway.responses import ResponsesBody
from betoken.gateway.tool_calls.parser import ToolCallParser
from betoken.gateway.tool_calls.parts import Arguments, Call, Content, Part, Reasoning
from betoken.gateway.tools import call_object


class ResponsesForm(Form):
    """One reply being written."""

    kind = "response"
    prefix = "resp"
    names_events = True

    def __init__(self, body: ResponsesBody, request_id: str, tool_format: str = "") -> None:
        super().__init__(body, request_id)
        self._body = body
        self._request_id = request_id
        self._tools = {tool.name: tool.parameters for tool in body.callable_tools}
        self._tool_format = tool_format
        self._parser = self._parser_of(())
        self._text = TokenText()
        self._items: list[dict[str, Any]] = []
        self._num_events = 0
        self._num_reasoning_tokens = 0
        self._is_open = False
        """The last item is still being written."""

    @property
    def num_choices(self) -> int:
        return 1

    def prompt_index(self, index: int) -> int:
        return 0

    def ids_needed(self, prompt_ids: Sequence[int], tokens: Sequence[Token]) -> set[int]:
        return super().ids_needed(prompt_ids, tokens) | ids_to_read(prompt_ids, tokens, bool(self._tools))

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        (answer,) = answers
        self._parser = self._parser_of(answer.prompt_ids)
        for _ in (*self._read(answer.tokens), *self._end()):
            pass
        return self._response(answer, self._body.betoken.provenance)

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        raise AssertionError("a response has no choices")

    def event(self, asked: AsyncGeneration, choice: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("a response's events are made by `events`")

    def events(self, asked: AsyncGeneration, choice: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for event in choice["events"]:
            yield event | {"sequence_number": self._num_events}
            self._num_events += 1

    def opening(self, index: int, asked: AsyncGeneration, seed: int | None) -> dict[str, Any]:
        self._parser = self._parser_of(asked.prompt_ids)
        begun = self._head("response", asked.model, asked.system_fingerprint)
        response = begun | self._settings() | {"status": "in_progress", "output": [], "usage": None}
        response["betoken"] = {"seed": seed}
        kinds = ("response.created", "response.in_progress")
        return {"events": [{"type": kind, "response": response} for kind in kinds]}

    def delta(self, index: int, piece: Piece) -> dict[str, Any]:
        events = list(self._read(piece.tokens))
        if told := piece_extension(piece, self._body.betoken):
            events.append({"type": "betoken.tokens", "betoken": told})
        return {"events": events}

    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        events = list(self._end())
        response = self._response(answer, has_tokens=False)
        return {"events": [*events, {"type": f"response.{response['status']}", "response": response}]}

    def _parser_of(self, prompt_ids: Sequence[int]) -> ToolCallParser:
        must_call = self._body.must_call
        return parser_of(prompt_ids, self.names, self._tool_format, self._tools, begins_anew=must_call)

    def _read(self, tokens: Sequence[Token]) -> Iterator[dict[str, Any]]:
        for token in tokens:
            self._num_reasoning_tokens += self._parser.is_reasoning
            yield from self._events_of(self._parser.feed(self._text.feed(token, self.names)))

    def _end(self) -> Iterator[dict[str, Any]]:
        yield from self._events_of(self._parser.end())
        yield from self._close()

    def _events_of(self, parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
        for part in parts:
            match part:
                case Content(text):
                    yield from self._add_text("message", "output_text", text)
                case Reasoning(text):
                    yield from self._add_text("reasoning", "reasoning_text", text)
                case Call():
                    yield from self._add_call(part)
                case Arguments(text):
                    yield self._add_arguments(text)

    def _add_text(self, kind: str, part_kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            yield from self._open_text(kind, part_kind)
        item = self._items[-1]
        item["content"][0]["text"] += text
        place = {"item_id": item["id"], "output_index": len(self._items) - 1, "content_index": 0}
        event = {"type": f"response.{part_kind}.delta", **place, "delta": text}
        yield event | ({"logprobs": []} if part_kind == "output_text" else {})

    def _open_text(self, kind: str, part_kind: str) -> Iterator[dict[str, Any]]:
        index = len(self._items)
        part: dict[str, Any] = {"type": part_kind, "text": ""}
        item: dict[str, Any] = {"type": kind, "id": f"{kind[:3]}_{self._request_id}_{index}", "status": "in_progress"}
        if kind == "message":
            part |= {"annotations": [], "logprobs": []}
            item["role"] = "assistant"
        else:
            item["summary"] = []
        yield {"type": "response.output_item.added", "output_index": index, "item": item | {"content": []}}
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        yield {"type": "response.content_part.added", **place, "part": dict(part)}
        self._items.append(item | {"content": [part]})
        self._is_open = True

    def _close(self) -> Iterator[dict[str, Any]]:
        """The text or call under way is whole."""
        if not self._is_open:
            return
        self._is_open = False
        item, index = self._items[-1], len(self._items) - 1
        item["status"] = "completed"
        if item["type"] == "function_call":
            yield from self._close_call(item, index)
            return
        part = item["content"][0]
        place = {"item_id": item["id"], "output_index": index, "content_index": 0}
        logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield {"type": f"response.{part['type']}.done", **place, "text": part["text"], **logprobs}
        yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _add_call(self, call: Call) -> Iterator[dict[str, Any]]:
        yield from self._close()
        index = len(self._items)
        called = call_object(call, self._request_id, 0, index)
        item = {"type": "function_call", "id": f"fc_{called['id']}", "call_id": called["id"], "name": call.name}
        item |= {"arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        self._items.append(item)
        self._is_open = True

    def _add_arguments(self, text: str) -> dict[str, Any]:
        item = self._items[-1]
        item["arguments"] += text
        place = {"item_id": item["id"], "output_index": len(self._items) - 1}
        return {"type": "response.function_call_arguments.delta", **place, "delta": text}

    def _close_call(self, item: dict[str, Any], index: int) -> Iterator[dict[str, Any]]:
        place = {"item_id": item["id"], "output_index": index}
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **place, **done}
        yield {"type": "response.output_item.done", "output_index": index, "item": item}

    def _response(self, answer: Completion, has_tokens: bool) -> dict[str, Any]:
        is_cut = str(answer.finish_reason) == "length"
        usage = self.usage([answer])
        return {
            **self._head("response", answer.model, answer.system_fingerprint),
            **self._settings(),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._items,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": self._num_reasoning_tokens},
                "total_tokens": usage["total_tokens"],
            },
            "betoken": choice_extension(answer, has_tokens),
        }

    def _settings(self) -> dict[str, Any]:
        """The request's fields, as responses repeat them."""
        body = self._body
        return {
            "created_at": self._created,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
            "top_p": body.top_p,
            "truncation": "disabled",
            "user": body.user or None,
        }
