"""Shared parts of all endpoints: the client of the router, the settings, and a request's data about its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.requests import Request

from betoken.client import AsyncClient
from betoken.gateway.errors import RefusedError
from betoken.gateway.metrics import Metrics
from betoken.gateway.settings import GatewaySettings
from betoken.gateway.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Door:
    """One per process."""

    client: AsyncClient
    settings: GatewaySettings
    vocabulary: Vocabulary
    metrics: Metrics

    @staticmethod
    def of(request: Request) -> Door:
        """The one behind a request."""
        door: Door = request.app.state.door
        return door


def request_id_of(request: Request) -> str:
    """The id that the reply's `x-request-id` has."""
    return str(request.state.request_id)


def may_know_places(request: Request) -> bool:
    """Whether the caller may be told where workers are: from this machine, or with a key, which the router checks."""
    host = request.client.host if request.client is not None else ""
    try:
        is_own = ip_address(host).is_loopback
    except ValueError:
        is_own = False
    return is_own or "authorization" in request.headers


def caller_headers(request: Request) -> Mapping[str, str]:
    """Headers for the router: the caller's key is the router's to check.

    Raises:
        RefusedError: a key that no header of gRPC can hold.
    """
    authorization = request.headers.get("authorization")
    if authorization is None:
        return {}
    if not (authorization.isascii() and authorization.isprintable()):
        raise RefusedError("authorization", "must be printable ASCII", status=401, code="invalid_api_key")
    return {"authorization": authorization}
