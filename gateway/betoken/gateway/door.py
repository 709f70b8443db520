"""Shared parts of all endpoints: the client of the router, the settings, and a request's data about its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from starlette.requests import Request

from betoken.client import AsyncClient
from betoken.common.names import REMOTE_CALLER
from betoken.gateway.errors import RefusedError
from betoken.gateway.metrics import Metrics
from betoken.gateway.model_names import ModelNames
from betoken.gateway.router_access import RouterAccess
from betoken.gateway.settings import GatewaySettings
from betoken.gateway.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class Door:
    """One per process."""

    client: AsyncClient
    settings: GatewaySettings
    vocabulary: Vocabulary
    metrics: Metrics
    access: RouterAccess
    names: ModelNames

    @staticmethod
    def of(request: Request) -> Door:
        """The one behind a request."""
        door: Door = request.app.state.door
        return door


def request_id_of(request: Request) -> str:
    """The id that the reply's `x-request-id` has."""
    return str(request.state.request_id)


def caller_headers(request: Request) -> Mapping[str, str]:
    """Headers for the router: the caller's key, which the router checks, and a mark of callers on other machines, which
    the router without keys sends no addresses.

    Raises:
        RefusedError: a key that no header of gRPC can hold.
    """
    remote = {} if _is_own(request) else {REMOTE_CALLER: "1"}
    authorization = request.headers.get("authorization")
    if authorization is None:
        return remote
    if not (authorization.isascii() and authorization.isprintable()):
        raise RefusedError("authorization", "must be printable ASCII", status=401, code="invalid_api_key")
    return {"authorization": authorization, **remote}


def _is_own(request: Request) -> bool:
    """Whether the client is a process of this machine."""
    try:
        return request.client is not None and ip_address(request.client.host).is_loopback
    except ValueError:
        return False
