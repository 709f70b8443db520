"""`/v1/models`, `/health`, `/version`, `/metrics`: what is served, and whether."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from betoken.client import BetokenError, ModelInfo, UnauthenticatedError, UnavailableError, WorkerStatus
from betoken.gateway.door import Door, caller_headers
from betoken.gateway.errors import RefusedError, failure_of
from betoken.gateway.metrics import CONTENT_TYPE

router = APIRouter()
_STARTED = int(time.time())


@router.get("/v1/models", response_model=None)
async def list_models(request: Request) -> Response:
    """The served model, once for each of its names."""
    info = await _info(request)
    models = [_described(info, name) for name in Door.of(request).names.shown(info.model)]
    return JSONResponse({"object": "list", "data": models})


@router.get("/v1/models/{model:path}", response_model=None)
async def show_model(model: str, request: Request) -> Response:
    """The served model, by its id or another name."""
    info = await _info(request)
    Door.of(request).names.check(model, info.model)
    return JSONResponse(_described(info, model))


@router.get("/health", response_model=None)
async def health(request: Request) -> Response:
    """200 while a verify worker is ready behind the router, else 503; without a key it needs, while that answers."""
    try:
        info = await Door.of(request).access.info(caller_headers(request))
    except UnauthenticatedError:  # a prober has no key: it learns only that the router answers
        return JSONResponse({"status": "ok"})
    except BetokenError as error:
        failure = failure_of(error)
        return JSONResponse(failure.body(), 503, failure.headers)
    if not any(worker.state == "ready" for worker in info.verify_workers):
        failure = failure_of(info.loading or UnavailableError("no verify worker is ready"))
        return JSONResponse(failure.body(), failure.status, failure.headers)
    return JSONResponse({"status": "ok"})


@router.get("/version", response_model=None)
async def show_version() -> Response:
    """Version of the gateway; answered as long as the process lives."""
    return JSONResponse({"version": version("betoken")})


@router.get("/info", response_model=None)
async def show_info(request: Request) -> Response:
    """The served model with its workers, as the page shows them."""
    info = _numbered(await _info(request))
    workers = [
        {name: value for name, value in asdict(worker).items() if name not in ("step_costs", "weights_fingerprint")}
        for worker in (*info.verify_workers, *info.draft_workers)
    ]
    policies = [asdict(policy) for policy in info.speculation_policies]
    facts = {"workers": workers, "router_version": info.version, "speculation_policies": policies}
    return JSONResponse(_described(info, Door.of(request).names.shown(info.model)[0]) | facts)


@router.get("/metrics", response_model=None, response_class=PlainTextResponse)
async def show_metrics(request: Request) -> Response:
    """Prometheus' text."""
    info = None
    with suppress(BetokenError, RefusedError):
        info = _numbered(await Door.of(request).access.info(caller_headers(request)))
    return Response(Door.of(request).metrics.page(info), media_type=CONTENT_TYPE)


async def _info(request: Request) -> ModelInfo:
    return await Door.of(request).client.model_info(headers=caller_headers(request), timeout_s=30.0)


def _numbered(info: ModelInfo) -> ModelInfo:
    """Number workers whose addresses the router sends to other callers only."""

    def numbered(workers: Sequence[WorkerStatus]) -> tuple[WorkerStatus, ...]:
        return tuple(replace(worker, address=worker.address or str(index)) for index, worker in enumerate(workers, 1))

    return replace(info, verify_workers=numbered(info.verify_workers), draft_workers=numbered(info.draft_workers))


def _described(info: ModelInfo, name: str) -> dict[str, Any]:
    sampling = {name: value for name, value in asdict(info.default_sampling).items() if value is not None}
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "betoken",
        "max_model_len": info.max_context,
        "betoken": {
            "system_fingerprint": info.system_fingerprint,
            "vocab_size": info.vocab_size,
            "has_chat_template": info.has_chat_template,
            "supports_infill": info.supports_infill,
            "drafters": info.drafters,
            "default_drafter": info.default_drafter,
            "verification_modes": [str(mode) for mode in info.verification_modes],
            "default_sampling": sampling,
        },
    }
