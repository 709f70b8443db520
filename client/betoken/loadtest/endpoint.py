"""A served endpoint over HTTP: its models, its metrics, and streams of server-sent events.

Blocking, one connection per stream; idle connections are kept for the next ones.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from betoken.common.errors import InvalidArgumentError, UnavailableError

_MAX_ERROR_BYTES = 4096
_STALE = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
"""Errors of a kept connection that the server has closed meanwhile."""


class RequestFailedError(Exception):
    """One request of a load test failed; its text is counted."""


@dataclass(frozen=True, slots=True)
class Served:
    """The served model."""

    model: str
    is_betoken: bool
    """Whether the server is our gateway, which reports rounds on request."""


class Endpoint:
    """HTTP calls to one server."""

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        """`url`: with or without its `/v1`.

        Raises:
            InvalidArgumentError: not an http or https URL with a host.
        """
        try:
            parts = urlsplit(url)
            self._port = parts.port
        except ValueError:
            parts, self._port = urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise InvalidArgumentError("url", url, "must be http://HOST:PORT or https://HOST:PORT, perhaps with a path")
        self._host = parts.hostname
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._timeout_s = timeout_s
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._idle: deque[http.client.HTTPConnection] = deque()
        self.url = url

    def served(self, model: str = "") -> Served:
        """Return the served model: the one named `model`, or the first.

        Raises:
            UnavailableError: the server cannot be reached or does not list models.
            InvalidArgumentError: it serves no model of that name.
        """
        try:
            listed = json.loads(self.text("/v1/models"))["data"]
            names = {str(one["id"]): one for one in listed}
        except (RequestFailedError, ValueError, LookupError, TypeError) as error:
            raise UnavailableError(f"{self.url} does not list its models: {error or type(error).__name__}") from None
        name = model or next(iter(names), "")
        if name not in names:
            raise InvalidArgumentError("model", model, f"must be one of those served, {', '.join(names) or 'none'}")
        return Served(name, names[name].get("owned_by") == "betoken")

    def text(self, path: str) -> str:
        """Return the body of a GET.

        Raises:
            RequestFailedError: no response, or another status than 200.
        """
        try:
            connection, response = self._respond("GET", path, None)
            body = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from None
        self._idle.append(connection)
        if response.status != http.client.OK:
            raise RequestFailedError(f"{path}: {_error_text(response.status, body)}")
        return body.decode("utf-8", "replace")

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Yield the events of a POST, each with `time.perf_counter()` at its arrival.

        Raises:
            RequestFailedError: another status than 200, an error in the stream, or its end before `[DONE]`.
        """
        try:
            connection, response = self._respond("POST", path, json.dumps(body).encode())
            try:
                yield from self._events(response)
            except GeneratorExit:
                connection.close()
                raise
            self._idle.append(connection)
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailedError(f"{type(error).__name__}: {error}") from None

    def _events(self, response: http.client.HTTPResponse) -> Iterator[tuple[float, dict[str, Any]]]:
        if response.status != http.client.OK:
            raise RequestFailedError(_error_text(response.status, response.read(_MAX_ERROR_BYTES)))
        for line in response:
            if not line.startswith(b"data:"):
                continue
            now, data = time.perf_counter(), line[len(b"data:") :].strip()
            if data == b"[DONE]":
                response.read()  # the end of the body, so that the connection can be used again
                return
            try:
                event = json.loads(data)
            except ValueError:
                raise RequestFailedError("an event is not JSON") from None
            if not isinstance(event, dict):
                raise RequestFailedError("an event is not an object")
            if "error" in event:
                raise RequestFailedError(_message(event))
            yield now, event
        raise RequestFailedError("the stream ended before [DONE]")

    def _respond(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        headers = self._headers | ({"content-type": "application/json"} if body is not None else {})
        while True:
            try:
                connection, is_kept = self._idle.pop(), True
            except IndexError:
                connection, is_kept = self._connection(), False
            try:
                connection.request(method, self._path + path, body, headers)
                return connection, connection.getresponse()
            except (OSError, http.client.HTTPException) as error:
                connection.close()
                if not (is_kept and isinstance(error, _STALE)):
                    raise

    def _connection(self) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)
        return http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)


def _error_text(status: int, body: bytes) -> str:
    with suppress(ValueError):
        return f"{status}: {_message(json.loads(body))}"
    return f"{status}: {body[:200].decode('utf-8', 'replace').strip()}"


def _message(body: Any) -> str:
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:200]
