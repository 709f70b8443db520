"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from betoken.client import ModelInfo
from betoken.gateway.body import Body, Many, Refusals, refuse, said_as
from betoken.gateway.door import Door, caller_headers
from betoken.gateway.json_route import JsonRoute
from betoken.gateway.messages import MAX_MESSAGES, Message

router = APIRouter(route_class=JsonRoute)


class TokenizeBody(Body):
    """Text or a chat."""

    refused: ClassVar[Refusals] = {
        "add_special_tokens": ("must be as a request of this model would have it", ()),
        "add_generation_prompt": ("must be true: as a request would have it", (True,)),
        "continue_final_message": ("must be false: as a request would have it", (False,)),
    }
    model: str = ""
    prompt: str | None = None
    messages: Many[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _check(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise refuse("prompt", "or messages must be given, one of the two")
        return self


class DetokenizeBody(Body):
    """Ids."""

    model: str = ""
    tokens: Annotated[Many[int], said_as("must be a list of token ids")] = Field(min_length=1)


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Ids of a text or of a chat, as a completion would see them."""
    door, headers = Door.of(request), caller_headers(request)
    info = await _checked_model(body.model, request)
    prompt: Any = body.prompt
    if body.messages is not None:
        prompt = [message.for_template() for message in body.messages]
    ids = await door.client.tokenize(prompt, headers=headers)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": info.max_context, "tokens": ids}
    if body.return_token_strs:
        pieces = (await door.client.detokenize(ids, headers=headers)).pieces if ids else ()
        told["token_strs"] = [piece.decode("utf-8", "replace") for piece in pieces]
    return JSONResponse(told)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Text of ids, without special tokens."""
    await _checked_model(body.model, request)
    answer = await Door.of(request).client.detokenize(body.tokens, headers=caller_headers(request))
    return JSONResponse({"prompt": answer.text})


async def _checked_model(model: str, request: Request) -> ModelInfo:
    info = await Door.of(request).client.model_info(headers=caller_headers(request))
    if model:
        Door.of(request).names.check(model, info.model)
    return info
