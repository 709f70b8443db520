"""API keys: how one travels with a call, and what a router keeps of it.

Knows no file of keys and no limits. A key is drawn at random, so that a plain SHA-256 of it can be kept in the open.
"""

import hashlib
import secrets
from collections.abc import Iterable
from typing import Any

from betoken.common.errors import InvalidArgumentError, UnauthenticatedError

API_KEY_VARIABLE = "BETOKEN_API_KEY"
MAX_API_KEY_CHARS = 512
HASH_PREFIX = "sha256:"
_HEADER = "authorization"
_SCHEME = "bearer"
_LIMIT = f"must be 1 to {MAX_API_KEY_CHARS} visible ASCII characters"


def new_api_key() -> str:
    """A fresh key of 256 random bits."""
    return f"bt-{secrets.token_urlsafe(32)}"


def hash_of(key: str) -> str:
    """The form of `key` in a file of keys: `sha256:` and 64 hex digits."""
    return HASH_PREFIX + hashlib.sha256(key.encode()).hexdigest()


def check_api_key(key: object) -> str:
    """`key`, if a header can hold it.

    Raises:
        InvalidArgumentError: it cannot; the error does not quote the key.
    """
    if not isinstance(key, str):
        raise InvalidArgumentError("api_key", type(key).__name__, _LIMIT)
    if not 1 <= len(key) <= MAX_API_KEY_CHARS or not all("!" <= character <= "~" for character in key):
        raise InvalidArgumentError("api_key", f"{len(key)} characters", _LIMIT)
    return key


def authorization(key: str) -> tuple[str, str]:
    """The metadata entry that carries `key`."""
    return _HEADER, f"Bearer {key}"


def api_key_of(metadata: Iterable[Any] | None) -> str:
    """The key that a call's metadata, (key, value) pairs, carries; empty when there is none.

    Raises:
        UnauthenticatedError: there are several, or one of another form.
    """
    values = [value for name, value in metadata or () if name == _HEADER]
    if not values:
        return ""
    scheme, _, key = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != _SCHEME or not key.strip():
        raise UnauthenticatedError("the metadata `authorization` must be given once, as `Bearer KEY`")
    return key.strip()
