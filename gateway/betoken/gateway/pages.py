"""Serves the chat page at `/`: static files of this package, with a policy that allows no other origin."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.responses import Response

FOLDER = Path(__file__).with_name("page")
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_FILES = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.suffix in _TYPES}
_HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

router = APIRouter()


@router.get("/", response_model=None, include_in_schema=False)
async def show_page() -> Response:
    """The page."""
    return _file("index.html")


@router.get("/page/{name:path}", response_model=None, include_in_schema=False)
async def show_file(name: str) -> Response:
    """A file of the page."""
    return _file(name)


def _file(name: str) -> Response:
    path = _FILES.get(name)
    if path is None:
        raise HTTPException(404)
    return Response(path.read_bytes(), media_type=_TYPES[path.suffix], headers=_HEADERS)
