"""How a servicer answers errors: typed ones with their status, unknown ones with an opaque text and a request id.

Knows the error table and `grpc.aio`; knows no service.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc

from betoken.common.errors import INTERNAL_MESSAGE, BetokenError, InternalError, UnavailableError, to_status
from betoken.rpc.decoding import raise_if_undecodable

_log = logging.getLogger(__name__)
_END_S = 1.0
"""Time in which gRPC cancels the handler of an ended call. A handler that raises earlier is logged with a traceback."""
_ENDS = (asyncio.CancelledError, GeneratorExit, KeyboardInterrupt, SystemExit)
"""Exceptions that end a handler normally."""
on_abort: ContextVar[Callable[[], None] | None] = ContextVar("on_abort", default=None)
"""Callback that runs before the status is sent; sending may block on a slow client."""


def new_request_id() -> str:
    """A random id of 16 hex digits."""
    return secrets.token_hex(8)


def internal_error(request_id: str, error: BaseException) -> InternalError:
    """Log an unknown error with its traceback under `request_id`; return the opaque error the caller may see."""
    _log.error("request %s failed: %s", request_id, type(error).__name__, exc_info=error)
    return InternalError(INTERNAL_MESSAGE, request_id=request_id)


async def abort(context: Any, error: BetokenError) -> NoReturn:
    """End the call with the status of `error`.

    Raises:
        grpc.aio.AbortError: always; a handler must let it pass (it is a plain `Exception`).
    """
    if (announce := on_abort.get()) is not None:
        announce()
    code, details, metadata = to_status(error)
    await context.abort(code, details, metadata)
    raise AssertionError("context.abort returned")


def _note(error: BetokenError) -> None:
    """Log a failed request under the id that its client is given. A refusal may quote its request, so its text stays
    out of the log."""
    if not error.request_id:
        return
    if isinstance(error, InternalError):
        _log.error("request %s failed: %s", error.request_id, error)
    elif isinstance(error, UnavailableError):
        _log.debug("request %s ends: %s", error.request_id, error)
    else:
        _log.debug("request %s ends %s", error.request_id, error.code.name)


@asynccontextmanager
async def typed_errors(context: Any, request_id: str = "", *, exposes_addresses: bool = True) -> AsyncIterator[None]:
    """The body of every handler: `async with typed_errors(context, request_id): ...`, unary and streaming alike.

    A `BetokenError` ends the call with its own status, and so does a request that could not be decoded. With a
    `request_id` the log names it. Without `exposes_addresses` addresses and paths are logged but not sent.
    Cancellation, `context.abort()` and the private errors of `grpc.aio` pass through. Anything else, panics of foreign
    libraries included, is logged with its traceback and answered INTERNAL without its text.
    """
    try:
        try:
            raise_if_undecodable()
            yield
        except BetokenError as error:
            error.request_id = error.request_id or request_id
            _note(error)
            await abort(context, error if exposes_addresses else error.without_places())
        except (grpc.aio.BaseError, *_ENDS):
            raise
        except BaseException as error:  # gRPC itself answers subclasses of Exception only: others leave a call for ever
            await abort(context, internal_error(request_id or new_request_id(), error))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError:  # a write or a status that came after the client or the deadline had ended the call
        await asyncio.sleep(_END_S)
        raise
