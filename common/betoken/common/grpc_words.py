"""gRPC's own words about a connection, translated to a cause: who listens there, and what it speaks.

Knows the texts of grpcio as they are; what it does not know it leaves as it is. Knows nothing of channels.
"""

import re
from typing import TypeVar
from urllib.parse import unquote

from betoken.common.errors import (
    BetokenError,
    DeadlineExceededError,
    LoadingError,
    UnavailableError,
    UnimplementedError,
)

_Error = TypeVar("_Error", bound=BetokenError)

_CAUSES: tuple[tuple[str, str], ...] = (
    (r"Connection refused", "nothing listens {there} (connection refused)"),
    (r"connect failed: addr: unix:.*No such file", "the socket does not exist"),
    (r"Domain name not found|Name or service not known", "the host name does not exist"),
    (r"errors resolving|DNS resolution failed|address lookup failed", "the host's name cannot be looked up"),
    (r"No route to host|Network is unreachable", "the host is unreachable"),
    (
        r"timed? ?out before receiving SETTINGS|FD Shutdown|[Cc]onnect(ion)? (attempt )?timed ?out",
        "nothing answers {there}",
    ),
    (r"WRONG_VERSION_NUMBER", "what listens {there} does not speak TLS"),
    (r"CERTIFICATE_VERIFY_FAILED: ([\w ]+)", r"the certificate shown {there} is not trusted by this side (\1)"),
    (r"Hostname Verification Check failed", "the certificate shown {there} is for another name"),
    (r"Failed parsing HTTP/2|http1\.x server", "what listens {there} does not speak gRPC"),
    (
        r"Received http2 header with status: (\d+)",
        r"the service {there} does not speak gRPC: it answers HTTP status \1",
    ),
    (
        r"failed to connect.*(Socket closed|Connection reset|recvmsg)",
        "what listens {there} ends the connection at once: does it speak TLS, want another certificate, or is it no"
        " gRPC service?",
    ),
    (r"Cancelling all calls", "the other side stopped"),
    (r"Socket closed|Connection reset|Broken pipe|Stream removed|GOAWAY", "the other side went away"),
)
_PEER = re.compile(r"(?:ipv4:|ipv6:|(?=unix:))(\S+?): ")
_KINDS = (UnavailableError, UnimplementedError)
_NO_METHOD = "Method not found!"
_NO_ANSWER = "Deadline Exceeded"


def with_cause(error: _Error) -> _Error:
    """`error` with the cause in place of gRPC's wording; other text is kept."""
    text = error.message
    if isinstance(error, _KINDS) and not isinstance(error, LoadingError) and not error.request_id:
        for pattern, cause in _CAUSES:
            if found := re.search(pattern, text):
                peer = _PEER.search(text)
                place = f"at {unquote(peer[1])}" if peer else "there"
                text = found.expand(cause).replace("{there}", place)
                break
    if isinstance(error, UnimplementedError) and text == _NO_METHOD:
        text = "what listens there knows no such method: it is another service, or one of another version"
    if isinstance(error, DeadlineExceededError) and text == _NO_ANSWER:
        text = "the time allowed is over"
    if text != error.message:
        error.args = (text,)
    return error
