"""`/infill` and `/completion`: answers as llama.cpp's server writes them, whole and in events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from betoken.client import AsyncGeneration, Completion, FinishReason, Piece
from betoken.gateway.form import Form, choice_extension, piece_extension
from betoken.gateway.infill import LlamaBody


class LlamaForm(Form):
    """Answers as llama.cpp's completion objects."""

    kind = ""
    prefix = "llama"
    names_events = True  # no [DONE]; the events have no type, and so no name

    def __init__(self, body: LlamaBody, request_id: str) -> None:
        super().__init__(body, request_id)
        self._body = body

    @property
    def num_choices(self) -> int:
        return 1

    def prompt_index(self, index: int) -> int:
        return 0

    def choice(self, index: int, answer: Completion) -> dict[str, Any]:
        body = self._body
        ids = [token.id for token in answer.tokens] if body.return_tokens else []
        usage, stop_type = answer.usage, "limit"
        if answer.finish_reason is FinishReason.STOP:
            stop_type = "word" if answer.stop else "eos"
        answer_fields = {
            "index": 0,
            "content": answer.text,
            "tokens": ids,
            "stop": True,
            "model": self.names_of_model(answer.model)[0],
            "tokens_predicted": len(answer.tokens),
            "tokens_evaluated": usage.prompt_tokens,
            "tokens_cached": usage.cached_prompt_tokens,
            "stop_type": stop_type,
            "stopping_word": answer.stop,
            "timings": _timings(answer),
            "betoken": choice_extension(answer, body.betoken.provenance),
        }
        return answer_fields if body.response_fields is None else _selected(answer_fields, body.response_fields)

    def whole(self, answers: Sequence[Completion]) -> dict[str, Any]:
        return self.choice(0, answers[0])

    def opening(self, index: int, asked: AsyncGeneration, seed: int | None) -> dict[str, Any] | None:
        return None

    def delta(self, index: int, piece: Piece) -> dict[str, Any] | None:
        ids = [token.id for token in piece.tokens]
        answer_fields = {"index": 0, "content": piece.text, "tokens": ids, "stop": False}
        if extension := piece_extension(piece, self._body.betoken):
            answer_fields["betoken"] = extension
        return answer_fields if piece.text or ids else None

    def ending(self, index: int, answer: Completion) -> dict[str, Any]:
        answer_fields = self.choice(0, answer)
        return answer_fields | {
            name: type(answer_fields[name])() for name in ("content", "tokens") if name in answer_fields
        }

    def events(self, asked: AsyncGeneration, choice: dict[str, Any]) -> Iterable[dict[str, Any]]:
        return (choice,)


def _timings(answer: Completion) -> dict[str, Any]:
    """Times of prompt and answer, milliseconds; a wait for admission counts as neither."""
    num_prompt = answer.usage.prompt_tokens - answer.usage.cached_prompt_tokens
    prompt_s = max(0.0, answer.time_to_first_token_s - answer.queue_s)
    predicted_s = max(0.0, answer.duration_s - answer.time_to_first_token_s)
    parts = (("prompt", num_prompt, prompt_s), ("predicted", len(answer.tokens), predicted_s))
    answer_fields: dict[str, Any] = {"cache_n": answer.usage.cached_prompt_tokens}
    for name, num, seconds in parts:
        answer_fields |= {
            f"{name}_n": num,
            f"{name}_ms": seconds * 1000,
            f"{name}_per_token_ms": seconds * 1000 / num if num else 0.0,
            f"{name}_per_second": num / seconds if seconds else 0.0,
        }
    stats = answer.speculation
    if stats.num_draft_tokens:
        answer_fields |= {"draft_n": stats.num_draft_tokens, "draft_n_accepted": stats.num_accepted_tokens}
    return answer_fields


def _selected(answer_fields: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields of these paths by their paths; unknown paths are left out, as in llama.cpp."""
    selected = {}
    for path in fields:
        value: Any = answer_fields
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            selected[path] = value
    return selected
