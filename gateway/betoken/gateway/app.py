"""The application: endpoints, and error responses.

Knows which body goes to which form; how answers are had and sent is `answering`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from betoken.client import AsyncClient, BetokenError, ToolFormat
from betoken.gateway import models, pages, tokens
from betoken.gateway.answering import Answers
from betoken.gateway.body import GenerationBody
from betoken.gateway.chat import ChatBody
from betoken.gateway.chat_form import ChatForm
from betoken.gateway.completions import CompletionBody, CompletionForm
from betoken.gateway.door import Door, caller_headers, request_id_of
from betoken.gateway.edge import Edge
from betoken.gateway.errors import ErrorBody, Failure, RefusedError, failure_of
from betoken.gateway.fim import FimBody, FimForm
from betoken.gateway.form import Form
from betoken.gateway.infill import InfillBody, LlamaCompletionBody
from betoken.gateway.infill_form import LlamaForm
from betoken.gateway.json_route import JsonRoute
from betoken.gateway.metrics import Metrics
from betoken.gateway.model_names import ModelNames
from betoken.gateway.question import Question
from betoken.gateway.responses import ResponsesBody
from betoken.gateway.responses_form import ResponsesForm
from betoken.gateway.router_access import RouterAccess
from betoken.gateway.settings import GatewaySettings
from betoken.gateway.tool_calls.formats import FORMATS
from betoken.gateway.vocabulary import Vocabulary

_FAULTS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused, or a limit is met."},
    "5XX": {"model": ErrorBody, "description": "No worker is available now."},
}
_ANSWERS: dict[int | str, dict[str, Any]] = {200: {"description": "The answer.", "content": {"text/event-stream": {}}}}
_EXPOSED = ["x-request-id", "retry-after", "retry-after-ms", "warning"]


def create_app(client: AsyncClient, settings: GatewaySettings) -> FastAPI:
    """The application over a client that its caller closes."""
    metrics, access = Metrics(), RouterAccess(client, settings.max_outage_s)
    app = FastAPI(title="Betoken", version=gateway_version(), docs_url=None, redoc_url=None, responses=_FAULTS)
    names = ModelNames(settings.served_model_name)
    app.state.door = Door(client, settings, Vocabulary(client), metrics, access, names)
    app.include_router(models.router)
    app.include_router(tokens.router)
    if settings.page:
        app.include_router(pages.router)
    generation = APIRouter(route_class=JsonRoute)
    for path, endpoint in _ENDPOINTS.items():
        generation.add_api_route(path, endpoint, methods=["POST"], response_model=None, responses=_ANSWERS)
    app.include_router(generation)
    app.add_exception_handler(RefusedError, _refused)
    app.add_exception_handler(BetokenError, _failed)
    app.add_exception_handler(HTTPException, _http)
    app.add_middleware(Edge, settings=settings, metrics=metrics, access=access)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
        )
    return app


async def completions(body: CompletionBody, request: Request) -> Response:
    """Answers to texts or token ids."""
    check_number(body.n * len(body.prompts()), "n", request)
    return reply(request, CompletionForm(body, request_id_of(request)), body.questions(), body)


async def chat_completions(body: ChatBody, request: Request) -> Response:
    """An answer to a chat."""
    check_number(body.n, "n", request)
    form = await tool_format(request, body)
    return reply(request, ChatForm(body, request_id_of(request), form.name), body.questions(form), body)


async def responses(body: ResponsesBody, request: Request) -> Response:
    """An answer to a conversation, by OpenAI's newer protocol."""
    form = await tool_format(request, body)
    return reply(request, ResponsesForm(body, request_id_of(request), form.name), body.questions(form), body)


async def fim_completions(body: FimBody, request: Request) -> Response:
    """The text of a gap, by Mistral's protocol."""
    return reply(request, FimForm(body, request_id_of(request)), body.questions(), body)


async def infill(body: InfillBody, request: Request) -> Response:
    """The text of a gap, by the protocol of llama.cpp's server."""
    return reply(request, LlamaForm(body, request_id_of(request)), body.questions(), body)


async def completion(body: LlamaCompletionBody, request: Request) -> Response:
    """An answer to a text or token ids, by the protocol of llama.cpp's server."""
    return reply(request, LlamaForm(body, request_id_of(request)), body.questions(), body)


_ENDPOINTS: dict[str, Callable[..., Any]] = {
    "/v1/completions": completions,
    "/v1/chat/completions": chat_completions,
    "/v1/responses": responses,
    "/v1/fim/completions": fim_completions,
    "/infill": infill,
    "/completion": completion,
}


def reply(request: Request, form: Form, questions: Sequence[Question], body: GenerationBody) -> Response:
    """The response that asks and answers."""
    names = Door.of(request).names
    form.names_of_model = names.shown
    form.spec_decode_metrics = level = Door.of(request).settings.per_request_spec_decode_metrics
    questions = [replace(question, model=names.for_router(question.model)) for question in questions]
    if level == "detailed":
        questions = [one.with_rounds() for one in questions]
    return Answers(request, form, questions, is_stream=body.stream)


async def tool_format(request: Request, body: ChatBody | ResponsesBody) -> ToolFormat:
    """Return the format in which the model's template writes tool calls, if the body has tools to call.

    Raises:
        RefusedError: the format is unknown, so that calls could not be distinguished from text.
        BetokenError: the router cannot be asked.
    """
    if not body.callable_tools:
        return ToolFormat("", {})
    form = (await Door.of(request).client.model_info(headers=caller_headers(request))).tool_format
    if form.name not in FORMATS:
        field = body.why_constrained or "tools"
        raise RefusedError(field, f"{field}: the model's chat template writes tool calls in no known format")
    return form


def check_number(num_choices: int, param: str, request: Request) -> None:
    """Raises:
    RefusedError: more answers than one request may have.
    """
    most = Door.of(request).settings.max_choices
    if num_choices > most:
        raise RefusedError(param, f"{param}: {num_choices} answers; at most {most} of one request")


def gateway_version() -> str:
    """Version of this package."""
    try:
        return version("betoken")
    except PackageNotFoundError:
        return "unknown"


def _error_response(failure: Failure) -> Response:
    return JSONResponse(failure.body(), failure.status, failure.headers)


async def _refused(request: Request, error: Any) -> Response:
    return _error_response(error.failure)


async def _failed(request: Request, error: Any) -> Response:
    return _error_response(failure_of(error))


async def _http(request: Request, error: Any) -> Response:
    place = f"{request.method} {request.url.path}"
    text = {404: f"{place[:200]} does not exist", 405: f"{place[:200]}: method not allowed"}.get(
        error.status_code, str(error.detail)
    )
    failure = Failure(error.status_code, text, headers=dict(error.headers or {}))
    return _error_response(failure)
