"""The errors of Betoken and the one table between them and gRPC statuses, used by servers, links and the SDK.

Details beyond a status (field, value, limit, retry-after, request id) travel in trailing metadata. Knows nothing of
servers or channels; needs only grpcio and protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import grpc

from betoken.v1.types_pb2 import LinkError

MAX_MESSAGE_BYTES = 1024  # HTTP/2 trailers hold 8 KiB in all, and each byte of non-ASCII text takes three on the wire
MAX_VALUE_CHARS = 120
INTERNAL_MESSAGE = "internal error; the server's log has the details under this request id"

_FIELD = "betoken-field-bin"
_VALUE = "betoken-value-bin"
_LIMIT = "betoken-limit-bin"
_RETRY_AFTER_MS = "betoken-retry-after-ms"
_PUSHBACK_MS = "grpc-retry-pushback-ms"  # the value for gRPC's own retry policy, if a client configures one
_REQUEST_ID = "betoken-request-id"
_STAGE = "betoken-loading-stage-bin"
_PERCENT = "betoken-loading-percent"
_MAX_TIME_DIGITS = 15  # no float holds a number of any length

Metadata = tuple[tuple[str, str | bytes], ...]


class BetokenError(Exception):
    """Base of every error a Betoken service or client raises on purpose; its text may be shown to the caller."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str = "", *, request_id: str = "") -> None:
        super().__init__(_fit(message))
        self.request_id = request_id
        """Id of the failed request in the server's log; empty when the server gave none."""
        self.partial: Any = None
        """The partial answer (a `betoken.client.PartialAnswer`) if the error ended its iteration; else None."""

    @property
    def message(self) -> str:
        """The text alone."""
        return str(self)

    def without_places(self) -> BetokenError:
        """A copy for callers that may not see addresses and paths."""
        return self


class InvalidArgumentError(BetokenError):
    """A field of a request is not acceptable; repeating the request cannot help."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, value: object, limit: str, *, request_id: str = "") -> None:
        self.field = field
        """Path of the field, e.g. `sampling.temperature`; empty when the server named none."""
        self.value = _shorten(value if isinstance(value, str) else _written(value), MAX_VALUE_CHARS)
        """The refused value as text, shortened."""
        self.limit = limit
        """The accepted values, e.g. `must be 0 to 100`. Must not contain `: `, because links split at the last one."""
        super().__init__(f"{field} = {self.value}: {limit}" if field else limit, request_id=request_id)

    def __reduce__(self) -> tuple[Any, ...]:
        """The arguments for pickle and copy; the text alone would not be enough."""
        return type(self), (self.field, self.value, self.limit), self.__dict__


class NotFoundError(BetokenError):
    """The named model, drafter or sequence does not exist here."""

    code = grpc.StatusCode.NOT_FOUND


class FailedPreconditionError(BetokenError):
    """The two sides do not fit together (protocol version, tokenizer, weights), or a sequence is in another state."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class ResourceExhaustedError(BetokenError):
    """A bounded queue or memory is full, or a message too large; refused before any work was done."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str = "", *, retry_after_s: float | None = None, request_id: str = "") -> None:
        super().__init__(message, request_id=request_id)
        self.retry_after_s = retry_after_s
        """When another attempt may succeed, seconds; None when the server gave no advice."""


class UnavailableError(BetokenError):
    """The other side cannot be reached, went away or is shutting down; another attempt may succeed."""

    code = grpc.StatusCode.UNAVAILABLE

    def __init__(self, message: str = "", *, places: str = "", request_id: str = "") -> None:
        """`places`: what follows the text, with addresses or paths."""
        super().__init__(f"{message} ({places})" if places else message, request_id=request_id)
        self._message = message

    def without_places(self) -> BetokenError:
        return UnavailableError(self._message, request_id=self.request_id)


class LoadingError(UnavailableError):
    """The model is still being loaded; another attempt may succeed once it is."""

    def __init__(self, stage: str, fraction: float, *, request_id: str = "") -> None:
        self.stage = stage
        """Current stage of loading, e.g. "packing weights"."""
        self.fraction = fraction
        """Done of the whole start, 0 to 1; of a download while that runs."""
        super().__init__(f"the model is loading: {stage} ({fraction:.0%})", request_id=request_id)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.stage, self.fraction), self.__dict__

    def without_places(self) -> BetokenError:
        return self


class DeadlineExceededError(BetokenError):
    """The time allowed for the request is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class RequestCancelledError(BetokenError):
    """The request was cancelled by its caller."""

    code = grpc.StatusCode.CANCELLED


class PermissionDeniedError(BetokenError):
    """The caller is known and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class UnauthenticatedError(BetokenError):
    """The caller's credentials are missing or wrong."""

    code = grpc.StatusCode.UNAUTHENTICATED


class UnimplementedError(BetokenError):
    """The server does not offer this method; usually a version difference."""

    code = grpc.StatusCode.UNIMPLEMENTED


class InternalError(BetokenError):
    """A fault of the server; its log has the details under `request_id`."""

    code = grpc.StatusCode.INTERNAL


_CLASSES: tuple[type[BetokenError], ...] = (
    InvalidArgumentError,
    NotFoundError,
    FailedPreconditionError,
    ResourceExhaustedError,
    UnavailableError,
    DeadlineExceededError,
    RequestCancelledError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnimplementedError,
    InternalError,
)
ERROR_BY_STATUS: dict[grpc.StatusCode, type[BetokenError]] = {cls.code: cls for cls in _CLASSES} | {
    grpc.StatusCode.OUT_OF_RANGE: InvalidArgumentError,
    grpc.StatusCode.ALREADY_EXISTS: FailedPreconditionError,
    grpc.StatusCode.ABORTED: UnavailableError,
    grpc.StatusCode.DATA_LOSS: InternalError,
    grpc.StatusCode.UNKNOWN: InternalError,
}
"""The table: one error class per gRPC status. Its inverse is `BetokenError.code`."""

_STATUS_BY_NUMBER: dict[int, grpc.StatusCode] = {status.value[0]: status for status in grpc.StatusCode}


def to_status(error: BetokenError) -> tuple[grpc.StatusCode, str, Metadata]:
    """Code, details and trailing metadata that carry `error` to the other side."""
    metadata: list[tuple[str, str | bytes]] = []
    if isinstance(error, InvalidArgumentError) and error.field:
        texts = ((_FIELD, error.field), (_VALUE, error.value), (_LIMIT, error.limit))
        metadata += [(key, _fit(text).encode()) for key, text in texts]
    if isinstance(error, ResourceExhaustedError) and error.retry_after_s is not None:
        retry_after_ms = str(max(0, round(error.retry_after_s * 1000)))
        metadata += [(_RETRY_AFTER_MS, retry_after_ms), (_PUSHBACK_MS, retry_after_ms)]
    if isinstance(error, LoadingError):
        metadata += [(_STAGE, _fit(error.stage).encode()), (_PERCENT, str(round(error.fraction * 100)))]
    if error.request_id:
        metadata.append((_REQUEST_ID, error.request_id))
    return error.code, error.message, tuple(metadata)


def from_status(code: grpc.StatusCode, details: str, metadata: Iterable[Any] | None = None) -> BetokenError:
    """The error that `to_status` took apart; a status of another origin (gRPC itself, a proxy) gives the nearest class.

    `metadata` is the trailing metadata: any iterable of (key, value) pairs.
    """
    extra: dict[str, str | bytes] = {key: value for key, value in metadata or ()}
    request_id = _text(extra.get(_REQUEST_ID))
    cls = ERROR_BY_STATUS.get(code, InternalError)
    if cls is InvalidArgumentError:
        if _FIELD in extra:
            field, value, limit = (_text(extra.get(key)) for key in (_FIELD, _VALUE, _LIMIT))
        else:
            field, value, limit = _split_message(details)
        return InvalidArgumentError(field, value, limit, request_id=request_id)
    if cls is ResourceExhaustedError:
        retry_after_ms = _text(extra.get(_RETRY_AFTER_MS))
        is_time = retry_after_ms.isdecimal() and len(retry_after_ms) <= _MAX_TIME_DIGITS
        retry_after_s = int(retry_after_ms) / 1000 if is_time else None
        return ResourceExhaustedError(details, retry_after_s=retry_after_s, request_id=request_id)
    if cls is UnavailableError and (percent := _text(extra.get(_PERCENT))).isdecimal():
        fraction = min(int(percent[:_MAX_TIME_DIGITS]), 100) / 100
        return LoadingError(_text(extra.get(_STAGE)), fraction, request_id=request_id)
    return cls(details or code.name, request_id=request_id)


def from_rpc_error(error: grpc.RpcError) -> BetokenError:
    """The typed error of a failed call, for `grpc.aio.AioRpcError` and for the errors of synchronous calls alike."""
    call: Any = error  # both kinds have the methods of grpc.Call; grpc.RpcError itself declares none
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    details = call.details() if hasattr(call, "details") else str(error)
    metadata = call.trailing_metadata() if hasattr(call, "trailing_metadata") else None
    return from_status(code, details or "", metadata)


def to_link_error(error: BetokenError, sequence_id: int = 0) -> LinkError:
    """The link entry for a fault of one sequence (0 = of the whole link)."""
    return LinkError(sequence_id=sequence_id, code=error.code.value[0], message=error.message)


def from_link_error(entry: LinkError) -> BetokenError:
    """The typed error of a link entry; unknown codes become `InternalError`."""
    return from_status(_STATUS_BY_NUMBER.get(entry.code, grpc.StatusCode.UNKNOWN), entry.message)


def _split_message(message: str) -> tuple[str, str, str]:
    """Field, value and limit out of `field = value: limit`; ("", "", message) for any other text."""
    field, equals, rest = message.partition(" = ")
    value, colon, limit = rest.rpartition(": ")
    return (field, value, limit) if equals and colon and " " not in field else ("", "", message)


def _written(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # an integer of more digits than Python writes
        return type(value).__name__


def _shorten(text: str, max_chars: int) -> str:
    """`text` cut to `max_chars`, with what a UTF-8 encoder refuses (lone surrogates) escaped."""
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= max_chars else text[: max_chars - 3] + "..."


def _fit(text: str) -> str:
    """`text` cut to `MAX_MESSAGE_BYTES` of UTF-8, lone surrogates escaped."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > MAX_MESSAGE_BYTES:
        data = data[: MAX_MESSAGE_BYTES - 3] + b"..."
    return data.decode("utf-8", "ignore")  # the last character may be cut


def _text(value: str | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value or ""
