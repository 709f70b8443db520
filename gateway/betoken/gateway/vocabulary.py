"""Bytes of token ids, asked of the router once each; the gateway has no tokenizer.

Knows how many tokens there are only by what it was asked; a system's ids are its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

from betoken.client import AsyncClient

_MAX_SYSTEMS = 2  # the current one, and its replacement


class Vocabulary:
    """Known bytes of ids, by system."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._known: dict[str, dict[int, bytes]] = {}

    async def names(self, system_fingerprint: str, ids: Set[int], headers: Mapping[str, str]) -> Mapping[int, bytes]:
        """Bytes of at least these ids.

        Raises:
            BetokenError: the router cannot be asked.
        """
        known = self._known.get(system_fingerprint)
        if known is None:
            while len(self._known) >= _MAX_SYSTEMS:
                del self._known[next(iter(self._known))]
            known = self._known[system_fingerprint] = {}
        if missing := sorted(ids - known.keys()):
            answer = await self._client.detokenize(missing, headers=headers)
            known.update(zip(missing, answer.pieces, strict=True))
        return known
