"""Faults as OpenAI's error bodies: status, type, code, and the request's own field in `param`.

One table from the SDK's errors; knows how the router's names of fields are called here, and nothing of requests.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from betoken.client import (
    BetokenError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    LoadingError,
    NotFoundError,
    PermissionDeniedError,
    RequestCancelledError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)

INVALID = "invalid_request_error"

_KINDS: Mapping[type[BetokenError], tuple[int, str, str | None]] = {
    InvalidArgumentError: (400, INVALID, None),
    UnauthenticatedError: (401, "authentication_error", "invalid_api_key"),
    PermissionDeniedError: (403, "permission_error", "permission_denied"),
    NotFoundError: (404, INVALID, "model_not_found"),
    FailedPreconditionError: (409, INVALID, "failed_precondition"),
    ResourceExhaustedError: (429, "rate_limit_error", "rate_limit_exceeded"),
    RequestCancelledError: (499, "api_error", "cancelled"),
    UnimplementedError: (501, "api_error", "unimplemented"),
    UnavailableError: (503, "api_error", "unavailable"),
    LoadingError: (503, "api_error", "loading"),
    DeadlineExceededError: (504, "api_error", "deadline_exceeded"),
}
"""Class -> (status, type, code); any other: 500."""
_RETRY_AFTER_S, _RETRY_AFTER_LOADING_S = 1.0, 3.0
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
_NAMES: Mapping[str, str] = {
    "prompt_ids.ids": "prompt",
    "prompt_ids": "prompt",
    "messages.messages": "messages",
    "messages.tools": "tools",
    "messages.template_arguments": "chat_template_kwargs",
    "messages.continue_final_message": "continue_final_message",
    "tenant": "user",
    "ids": "tokens",
    "sampling.min_new_tokens": "min_tokens",
    "sampling.max_new_tokens": "max_tokens",
    "max_length": "max_tokens",
    "constraint": "betoken.constraint",
    "add_special_tokens": "betoken.add_special_tokens",
    "speculation.drafter.name": "betoken.drafter",
    "speculation.drafter.settings": "betoken.drafter_settings",
}
_INTERNAL_FIELDS = (
    "open.committed_ids",
    "block",
    "close",
    "resume_ids",
    "resume_prompt_logprobs",
    "system_fingerprint",
)
"""Fields of the links and of resumed streams, which no request has: an error that names one is internal."""
_PREFIXES: Mapping[str, str] = {"sampling.": "", "speculation.": "betoken."}
_ADDRESSES = re.compile(r"\b(?:ipv4|ipv6|unix|unix-abstract|dns):|\bat \S+:\d+\b|DNS resolution failed")
"""Errors of connections contain the router's address."""
_OF_LOGIT_BIAS = re.compile(r"logit_bias\[\d+\]\.\w+")


class ErrorObject(BaseModel):
    """The fault, in the words of OpenAI's errors."""

    message: str
    type: str
    param: str | None
    """Field of the request that it is about."""
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error response."""

    error: ErrorObject


@dataclass(frozen=True, slots=True)
class Failure:
    """The answer to a failed request."""

    status: int
    message: str
    param: str | None = None
    type: str = INVALID
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """The JSON object."""
        error = ErrorObject(message=self.message, type=self.type, param=self.param, code=self.code)
        return ErrorBody(error=error).model_dump()


class RefusedError(Exception):
    """A request that the gateway itself refuses."""

    def __init__(self, param: str | None, message: str, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        kind = _TYPES.get(status, INVALID if status < 500 else "api_error")
        self.failure = Failure(status, message, param, kind, code)


def failure_of(error: BetokenError, names: Mapping[str, str] | None = None) -> Failure:
    """The HTTP form of an SDK error; `names` are further names of fields, by the router's."""
    status, kind, code = _KINDS.get(type(error), (500, "api_error", "internal_error"))
    message, param, headers = error.message, None, {}
    if isinstance(error, UnavailableError | UnimplementedError) and _ADDRESSES.search(message):
        message = "the router cannot be reached"
    if isinstance(error, InvalidArgumentError) and _names_any(error.field, _INTERNAL_FIELDS):
        status, kind, code = 500, "api_error", "internal_error"
    elif isinstance(error, InvalidArgumentError) and error.field:
        param = param_of(error.field, names or {})
        message = f"{param} = {error.value}: {error.limit}"
        code = "context_length_exceeded" if "context" in error.limit and "tokens" in error.value else None
    elif isinstance(error, NotFoundError):
        param = "model"
    elif isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None:
        headers = retry_after(error.retry_after_s)
    elif isinstance(error, LoadingError):
        headers = retry_after(_RETRY_AFTER_LOADING_S)
    elif isinstance(error, UnavailableError):
        headers = retry_after(_RETRY_AFTER_S)
    return Failure(status, message, param, kind, code, headers)


def _names_any(router_field: str, fields: Sequence[str]) -> bool:
    """Whether a field is one of these or a part of one."""
    return any(router_field == field or router_field.startswith((field + "[", field + ".")) for field in fields)


def retry_after(seconds: float) -> dict[str, str]:
    """Retry delay headers: whole seconds for HTTP, milliseconds for OpenAI's clients."""
    return {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(math.ceil(seconds * 1000))}


def param_of(router_field: str, names: Mapping[str, str]) -> str:
    """The request's name of a field that the router or a worker rejected."""
    router_field = router_field.removeprefix("open.")
    for known, name in (*names.items(), *_NAMES.items()):
        if _names_any(router_field, (known,)):
            return name + router_field.removeprefix(known)
    for prefix, replaced in _PREFIXES.items():
        if router_field.startswith(prefix):
            name = replaced + router_field.removeprefix(prefix)
            return "logit_bias" if _OF_LOGIT_BIAS.fullmatch(name) else name
    return router_field
