"""The file of API keys: TOML with the hash of each key, its tenant and its limits.

Knows the file's form; knows no calls.

    [[keys]]
    name = "alice"                  # in errors and logs
    hash = "sha256:..."             # made by `betoken new-key`
    tenant = "research"             # default: the key's name
    max_streams = 8                 # and max_queue, tokens_per_minute, max_prompt_bytes; absent = no limit

    [tenants.research]              # all its keys together
    tokens_per_minute = 100000
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from betoken.common.api_key import HASH_PREFIX
from betoken.common.errors import FailedPreconditionError
from betoken.router.policy.account import Limits
from betoken.rpc.validation.request import MAX_TENANT_BYTES

MAX_FILE_BYTES = 16 << 20
_MOST = 1 << 53


class LimitsEntry(BaseModel):
    """The limits of a key or a tenant."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_streams: int | None = Field(None, ge=1, le=_MOST)
    max_queue: int | None = Field(None, ge=0, le=_MOST)
    tokens_per_minute: int | None = Field(None, ge=1, le=_MOST)
    max_prompt_bytes: int | None = Field(None, ge=1, le=_MOST)

    def limits(self) -> Limits:
        """The limits, in an account's form."""
        return Limits(self.max_streams, self.max_queue, self.tokens_per_minute, self.max_prompt_bytes)


class KeyEntry(LimitsEntry):
    """One key."""

    name: str = Field(min_length=1, max_length=MAX_TENANT_BYTES, pattern=r"^[!-~]+$")
    hash: str = Field(pattern=rf"^{HASH_PREFIX}[0-9a-f]{{64}}$")
    tenant: str = Field("", max_length=MAX_TENANT_BYTES, pattern=r"^[!-~]*$")

    @property
    def tenant_name(self) -> str:
        """The tenant of its requests."""
        return self.tenant or self.name


class KeyFile(BaseModel):
    """The whole file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: tuple[KeyEntry, ...] = ()
    tenants: dict[str, LimitsEntry] = {}

    @model_validator(mode="after")
    def _check_unique(self) -> Self:
        for what in ("name", "hash"):
            counts = Counter(getattr(key, what) for key in self.keys)
            if repeated := [value for value, count in counts.items() if count > 1]:
                owners = [key.name for key in self.keys if getattr(key, what) == repeated[0]]
                raise ValueError(f"the keys {' and '.join(owners)} have the same {what}")
        return self

    def warnings(self) -> list[str]:
        """Return what is probably a mistake and changes no key."""
        unused = self.tenants.keys() - {key.tenant_name for key in self.keys}
        return [f"tenants.{name}: no key has this tenant" for name in sorted(unused)]


def read_key_file(path: Path) -> KeyFile:
    """The keys of `path`.

    Raises:
        FailedPreconditionError: the file cannot be read or is malformed; the text names the entry and never quotes a
            hash.
    """
    try:
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise FailedPreconditionError(f"{path}: {size} bytes, must be at most {MAX_FILE_BYTES}")
        if not path.is_file():
            raise FailedPreconditionError(f"{path} is not a file")
        return KeyFile.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise FailedPreconditionError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in fault["loc"])
        message = fault["msg"].removeprefix("Value error, ")
        raise FailedPreconditionError(f"{path}: {place}{': ' if place else ''}{message}") from None
    except RecursionError:
        raise FailedPreconditionError(f"{path} cannot be read: it is nested too deeply") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise FailedPreconditionError(f"{path} is not TOML: {error}") from None
