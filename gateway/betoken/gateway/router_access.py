"""Asks the router about itself at once: whether a caller's key is good, and how its workers are.

The router decides: what is found here only spares it, and the gateway, the work for requests that it would refuse.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping

from betoken.client import (
    AsyncClient,
    BetokenError,
    DeadlineExceededError,
    ModelInfo,
    RetryPolicy,
    UnauthenticatedError,
    UnavailableError,
)

_TIMEOUT_S = 1.0
_ACCEPTED_S = 5.0
"""How long an accepted key is not checked again, seconds."""
_AWAY_S = 1.0
"""Pause after a failed call, seconds."""
_MAX_KEYS = 1024
_NO_RETRIES = RetryPolicy(max_retries=0)


class RouterAccess:
    """Short calls to one router, without retries."""

    def __init__(self, client: AsyncClient, max_outage_s: float) -> None:
        self._client = client
        self._max_outage_s = max_outage_s
        self._accepted_until: dict[bytes, float] = {}
        self._open_until = 0.0
        self._failed: tuple[float, str] | None = None
        self._away_since: float | None = None

    async def check_key(self, headers: Mapping[str, str]) -> None:
        """Check the key in `headers`; passes if the router cannot be asked, unless it is gone for longer than answers
        wait for it.

        Raises:
            UnauthenticatedError: the router refuses the key, or needs one.
            UnavailableError: the router has been away for too long.
        """
        now, key = time.monotonic(), hashlib.sha256(headers.get("authorization", "").encode()).digest()
        if now < max(self._open_until, self._accepted_until.get(key, 0.0)):
            return
        try:
            info = await self.info(headers)
        except UnauthenticatedError:
            self._accepted_until.pop(key, None)
            raise
        except UnavailableError:
            if self._away_since is not None and now - self._away_since > self._max_outage_s:
                raise
        except BetokenError:
            pass
        else:
            self._accept(info, key, "authorization" in headers)

    async def info(self, headers: Mapping[str, str]) -> ModelInfo:
        """Return the router's description; fails at once for a moment after a failed call.

        Raises:
            BetokenError: the router cannot be asked, or refuses the key.
        """
        if self._failed is not None and time.monotonic() < self._failed[0]:
            raise UnavailableError(self._failed[1])
        try:
            info = await self._client.model_info(wait=False, timeout_s=_TIMEOUT_S, headers=headers, retry=_NO_RETRIES)
        except (DeadlineExceededError, UnavailableError) as error:
            message = error.message if isinstance(error, UnavailableError) else "the router does not answer"
            self._failed = time.monotonic() + _AWAY_S, message
            if self._away_since is None:
                self._away_since = time.monotonic()
            raise UnavailableError(message) from None
        except BetokenError:
            self._failed = self._away_since = None
            raise
        self._failed = self._away_since = None
        return info

    def _accept(self, info: ModelInfo, key: bytes, has_key: bool) -> None:
        until = time.monotonic() + _ACCEPTED_S
        if not info.requires_api_key:
            self._open_until = until
            return
        if not has_key:
            raise UnauthenticatedError("an API key is needed: send the header authorization: Bearer KEY")
        while len(self._accepted_until) >= _MAX_KEYS:
            del self._accepted_until[next(iter(self._accepted_until))]
        self._accepted_until[key] = until
