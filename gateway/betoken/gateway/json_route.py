"""Routes that parse and validate JSON bodies: large ones on a thread, so that the event loop keeps serving others.

FastAPI would parse and validate on the event loop, and report errors in pydantic's words.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Set
from concurrent.futures import ThreadPoolExecutor
from email.message import Message
from typing import Any, cast

from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from betoken.gateway.body import Body
from betoken.gateway.door import Door
from betoken.gateway.errors import INVALID, Failure
from betoken.gateway.invalid_body import invalid_body, not_an_object

_MAX_BYTES_ON_LOOP = 32 << 10
_PARSERS = ThreadPoolExecutor(max_workers=2, thread_name_prefix="json-body")
"""Two threads bound the memory of parsed bodies that are not validated yet."""


class JsonRoute(APIRoute):
    """Route whose endpoint gets a validated body."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; invalid bodies are refused before FastAPI sees them."""
        handler = super().get_route_handler()
        if self.body_field is None:
            return handler
        body: type[Body] = cast(Any, self.body_field.field_info.annotation)
        adapter: TypeAdapter[Any] = TypeAdapter(body)
        known_fields = body.model_fields.keys() | body.refused.keys()

        async def handle(request: Request) -> Response:
            raw = await request.body()
            known = known_fields if Door.of(request).settings.ignore_unknown_fields else None
            ignored: list[str] = []
            if not _is_json(request):
                parsed: Any = not_an_object()
            elif len(raw) <= _MAX_BYTES_ON_LOOP:
                parsed = _parsed(raw, adapter, known, ignored)
            else:
                loop = asyncio.get_running_loop()
                parsed = await loop.run_in_executor(_PARSERS, _parsed, raw, adapter, known, ignored)
            request.state.ignored_fields = ignored
            if isinstance(parsed, Failure):
                return JSONResponse(parsed.body(), parsed.status)
            return await handler(_ParsedRequest(request, parsed))

        return handle


class _ParsedRequest(Request):
    """Request with a body that is validated already: FastAPI passes an instance of the model on as it is."""

    def __init__(self, request: Request, parsed: Any) -> None:
        super().__init__(request.scope, request.receive)
        self._json = parsed
        self._body = b"{}"


def _parsed(raw: bytes, adapter: TypeAdapter[Any], known: Set[str] | None, ignored: list[str]) -> Any:
    """Return the validated body, or the refusal.

    `known`: fields of a body whose other fields are `ignored`; None = these are refused.
    """
    try:
        values = json.loads(raw)
        if known is not None and isinstance(values, dict):
            ignored += sorted(values.keys() - known)
            values = {name: value for name, value in values.items() if name in known}
        return adapter.validate_python(values)
    except ValidationError as error:
        return invalid_body(error)
    except json.JSONDecodeError as error:
        return Failure(400, f"the body is not JSON: {error.msg}", None, INVALID, "invalid_json")
    except (ValueError, RecursionError):  # not UTF-8, an integer of thousands of digits, nested too deeply
        return Failure(400, "the body is not JSON that can be read", None, INVALID, "invalid_json")


def _is_json(request: Request) -> bool:
    header = Message()
    header["content-type"] = request.headers.get("content-type", "")
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
