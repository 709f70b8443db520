"""Chats' answers as OpenAI's `chat.completion` objects, whole and in events: text, thoughts and calls of tools.

Knows no transport: `answering` asks and sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from betoken.client import AsyncGeneration, Completion, Piece, Token
from betoken.gateway.chat import ChatBody
from betoken.gateway.form import Form, choice_extension, piece_extension
from betoken.gateway.logprobs import chat_logprobs
from betoken.gateway.read_answer import TokenText, ids_to_read, parser_of
from betoken.gateway.tool_calls.parser import ToolCallParser
from betoken.gateway.tool_calls.parts import Arguments, Call, Content, Part, Reasoning
from betoken.gateway.tools import call_object


class ChatForm(Form):
    """One reply being written."""

    kind = "chat.completion"
    event_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def __init__(self, body: ChatBody, request_id: str, tool_format: str = "") -> None:
        super().__init__(body, request_id)
        self._body = body
        self._request_id = request_id
        self._tools = {tool.function.name: tool.function.parameters for tool in body.callable_tools}
        self._tool_format = tool_format
        self._answers: dict[int, _ReadAnswer] = {}

    @property
    def num_choices(self) -> int:
        return self._body.n

    def prompt_index(self, index: int) -> int:
        return 0

    def ids_needed(self, prompt_ids: Sequence[int], tokens: Sequence[Token]) -> set[int]:
        return super().ids_needed(prompt_ids, tokens) | ids_to_read(prompt_ids, tokens, bool(self._tools))

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        read = self._answer(index, answer.prompt_ids)
        delta = read.delta(answer.tokens, is_end=True)
        message = {"role": "assistant", "content": delta.pop("content", None), "refusal": None} | delta
        if message["content"] is None and not read.num_calls:
            message["content"] = ""
        for call in message.get("tool_calls", ()):
            del call["index"]
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(answer.tokens, self.bytes_of) if self._body.logprobs else None,
            "finish_reason": read.finish_reason(answer),
            "betoken": choice_extension(answer, self._body.betoken.provenance),
        }

    def opening(self, index: int, asked: AsyncGeneration, seed: int | None) -> dict[str, Any] | None:
        self._answer(index, asked.prompt_ids)
        return self._event_choice(index, {"role": "assistant", "content": ""}) | {"betoken": {"seed": seed}}

    def delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        choice = self._event_choice(index, self._answers[index].delta(piece.tokens))
        if self._body.logprobs and piece.tokens:
            choice["logprobs"] = chat_logprobs(piece.tokens, self.bytes_of)
        if told := piece_extension(piece, self._body.betoken):
            choice["betoken"] = told
        return choice if choice["delta"] or choice["logprobs"] or "betoken" in choice else None

    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        read = self._answer(index, answer.prompt_ids)
        choice = self._event_choice(index, read.delta((), is_end=True), read.finish_reason(answer))
        return choice | {"betoken": choice_extension(answer, has_tokens=False)}

    def usage(self, answers: Sequence[Completion]) -> dict[str, Any]:
        num_reasoning = sum(read.num_reasoning_tokens for read in self._answers.values())
        usage = super().usage(answers)
        usage["completion_tokens_details"]["reasoning_tokens"] = num_reasoning
        return usage

    def _answer(self, index: int, prompt_ids: Sequence[int]) -> _ReadAnswer:
        if index not in self._answers:
            must_call = self._body.must_call
            parser = parser_of(prompt_ids, self.names, self._tool_format, self._tools, begins_anew=must_call)
            self._answers[index] = _ReadAnswer(parser, self, index, self._request_id)
        return self._answers[index]

    @staticmethod
    def _event_choice(index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


class _ReadAnswer:
    """One answer as it is read."""

    def __init__(self, parser: ToolCallParser, form: Form, choice: int, request_id: str) -> None:
        self._parser = parser
        self._text = TokenText()
        self._form = form
        self._choice = choice
        self._request_id = request_id
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    def delta(self, tokens: Sequence[Token], *, is_end: bool = False) -> dict[str, Any]:
        """The content of the next tokens, by the message's fields."""
        parts: list[Part] = []
        for token in tokens:
            self.num_reasoning_tokens += self._parser.is_reasoning
            parts += self._parser.feed(self._text.feed(token, self._form.names))
        if is_end:
            parts += self._parser.end()
        return self._fields(parts)

    def finish_reason(self, answer: Completion) -> str:
        """OpenAI's word."""
        return "tool_calls" if self.num_calls and answer.finish_reason == "stop" else str(answer.finish_reason)

    def _fields(self, parts: Iterable[Part]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for part in parts:
            match part:
                case Content(text):
                    fields["content"] = fields.get("content", "") + text
                case Reasoning(text):
                    fields["reasoning_content"] = fields.get("reasoning_content", "") + text
                case Call():
                    call = call_object(part, self._request_id, self._choice, self.num_calls)
                    fields.setdefault("tool_calls", []).append({"index": self.num_calls, **call})
                    self.num_calls += 1
                case Arguments(text):
                    calls = fields.setdefault("tool_calls", [])
                    if not calls:
                        calls.append({"index": self.num_calls - 1, "function": {"arguments": ""}})
                    calls[-1]["function"]["arguments"] += text
        return fields
