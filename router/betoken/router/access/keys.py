"""The keys of a router: who calls, and what their key and tenant may use. Follows its file while it runs.

A call's key is compared with all hashes there are, each in constant time. Knows no requests and no queue.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from betoken.common import names
from betoken.common.address import is_own_peer
from betoken.common.api_key import api_key_of, hash_of
from betoken.common.errors import BetokenError, PermissionDeniedError, UnauthenticatedError
from betoken.router.access.key_file import KeyEntry, KeyFile, read_key_file
from betoken.router.policy.account import Account, Limits
from betoken.router.policy.reservation import Reservation
from betoken.v1.generation_pb2 import DetokenizeRequest, GenerateRequest, TokenizeRequest

_log = logging.getLogger(__name__)
_READ_PERIOD_S = 1.0
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls."""

    tenant: str | None = None
    """The key's; None = no key, so that a request's own word is taken."""
    accounts: Sequence[Account] = ()
    """Accounts of the key and of its tenant."""

    def tenant_of(self, asked: str) -> str:
        """The tenant of a request that names the tenant `asked` (empty: none).

        Raises:
            PermissionDeniedError: another than the key's.
        """
        if self.tenant is None:
            return asked
        if asked not in ("", self.tenant):
            raise PermissionDeniedError(f"tenant {asked!r}: this key is {self.tenant!r}'s")
        return self.tenant

    def check_tokens(self) -> None:
        """Raises:
        ResourceExhaustedError: the tokens of this minute are used up.
        """
        for account in self.accounts:
            account.check_tokens()

    def check_input(self, request: GenerateRequest | TokenizeRequest | DetokenizeRequest) -> None:
        """Raises:
        InvalidArgumentError: its text or ids are larger than one of the accounts takes.
        """
        if self.accounts:
            sizes = [_input_size(request)]
            if isinstance(request, GenerateRequest) and request.HasField("prediction"):
                sizes.append(("prediction", request.prediction.ByteSize()))
            for account in self.accounts:
                for field, num_bytes in sizes:
                    account.check_prompt(field, num_bytes)

    def check_answers(self, num_answers: int) -> None:
        """Raises:
        InvalidArgumentError: more answers than ever run or wait at the same time.
        """
        for account in self.accounts:
            account.check_answers("n", num_answers)

    def reserve(self, num_tokens: int) -> Reservation:
        """Reserve the most tokens that a request may use.

        Raises:
            ResourceExhaustedError: too few are left.
        """
        return Reservation(self.accounts, num_tokens)


ANYBODY = Caller()
"""The caller of a router without keys."""


class Keys:
    """Callers by key. Without a file all callers are served."""

    def __init__(self, path: Path | None, on_change: Callable[[], None] = lambda: None) -> None:
        """`on_change` follows a change of limits.

        Raises:
            FailedPreconditionError: the file cannot be read or is not a file of keys.
        """
        self._path = path
        self._on_change = on_change
        self._callers: list[tuple[str, Caller]] = []
        self._key_accounts: dict[str, Account] = {}
        self._tenant_accounts: dict[str, Account] = {}
        self.num_rejected_files = 0
        """Changed files that were rejected."""
        if path is not None:
            self._state = _state(path)
            self._take(read_key_file(path))

    @property
    def are_needed(self) -> bool:
        """Whether callers need a key."""
        return self._path is not None

    def caller(self, metadata: Iterable[Any] | None) -> Caller:
        """The key that a call's metadata holds.

        Raises:
            UnauthenticatedError: a key is required, and it is missing or unknown.
        """
        if self._path is None:
            return ANYBODY
        if not (key := api_key_of(metadata)):
            raise UnauthenticatedError("this router needs an API key: send the metadata `authorization: Bearer KEY`")
        presented, found = hash_of(key), None
        for known, caller in self._callers:
            if hmac.compare_digest(presented, known):
                found = caller  # continue: the time must not depend on its position
        if found is None:
            raise UnauthenticatedError("the API key is not known here")
        return found

    def check_if_any(self, metadata: Iterable[Any] | None) -> None:
        """Caller of methods that need no key.

        Raises:
            UnauthenticatedError: there is a key, and it is not known.
        """
        if self._path is not None and api_key_of(metadata):
            self.caller(metadata)

    def exposes_addresses(self, context: Any) -> bool:
        """Whether the caller of a `grpc.aio` context may see addresses and paths: with a key, or if none is
        needed as a process of this machine that does not call for a remote client."""
        if self._path is None:
            is_remote = any(name == names.REMOTE_CALLER for name, _ in context.invocation_metadata() or ())
            return is_own_peer(context.peer()) and not is_remote
        try:
            self.caller(context.invocation_metadata())
        except UnauthenticatedError:
            return False
        return True

    async def run(self) -> None:
        """Follow the file until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_READ_PERIOD_S)
            await self._follow(self._path)

    async def _follow(self, path: Path) -> None:
        """Read the file if it has changed. If it is gone or malformed, the present keys stay."""
        state = await asyncio.to_thread(_state, path)
        if state == self._state:
            return
        self._state = state
        try:
            file = await asyncio.to_thread(read_key_file, path)
        except Exception as error:  # whatever it holds, the next one must be read
            self.num_rejected_files += 1
            _log.warning("the API keys at hand stay: %s", error, exc_info=not isinstance(error, BetokenError))
            return
        self._take(file)
        self._on_change()
        _log.info("%d API keys read from %s", len(file.keys), path)

    def _take(self, file: KeyFile) -> None:
        for warning in file.warnings():
            _log.warning("%s: %s", self._path, warning)
        tenants = {name: entry.limits() for name, entry in file.tenants.items()}
        by_tenant = {key.tenant_name: tenants.get(key.tenant_name, Limits()) for key in file.keys}
        self._tenant_accounts = _accounts("tenant", by_tenant, self._tenant_accounts)
        self._key_accounts = _accounts("key", {key.name: key.limits() for key in file.keys}, self._key_accounts)
        self._callers = [(key.hash, self._caller(key)) for key in file.keys]

    def _caller(self, key: KeyEntry) -> Caller:
        return Caller(key.tenant_name, (self._key_accounts[key.name], self._tenant_accounts[key.tenant_name]))


def _accounts(kind: str, limits: dict[str, Limits], known: dict[str, Account]) -> dict[str, Account]:
    """An account per name; known accounts are kept, with the new limits."""
    accounts = {}
    for name, theirs in limits.items():
        account = accounts[name] = known.get(name) or Account(f"{kind} {name}", theirs)
        if account.limits != theirs:
            account.limits = theirs
    return accounts


def _input_size(request: GenerateRequest | TokenizeRequest | DetokenizeRequest) -> tuple[str, int]:
    """The field that a prompt is in, and its bytes."""
    if isinstance(request, DetokenizeRequest):
        return "ids", _ID_BYTES * len(request.ids)
    if request.WhichOneof("input") == "messages":
        return "messages", request.messages.ByteSize()
    if isinstance(request, GenerateRequest) and request.WhichOneof("input") == "infill":
        return "infill", request.infill.ByteSize()
    if isinstance(request, GenerateRequest) and request.WhichOneof("input") == "prompt_ids":
        return "prompt_ids.ids", _ID_BYTES * len(request.prompt_ids.ids)
    return "prompt", len(request.prompt.encode())


def _state(path: Path) -> tuple[int, ...]:
    """Identity of the file's version, which changes with the file or its symbolic link; empty without a file."""
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size
