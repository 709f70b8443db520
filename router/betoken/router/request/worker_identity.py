"""The identity that two verify workers must share for a request to get the same answer from either.

Knows handshakes; knows no links and no requests.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import NamedTuple

from google.protobuf.text_format import MessageToString

from betoken.v1.types_pb2 import WorkerHello


@dataclass(frozen=True)
class WorkerIdentity:
    """Everything besides the request that decides an answer."""

    weights_fingerprint: str
    tokenizer_hash: str
    dtype: str
    numerics: str
    max_context: int
    """An answer ends there."""
    eos_token_ids: tuple[int, ...]
    default_sampling: str
    """Default sampling parameters."""

    @classmethod
    def of(cls, hello: WorkerHello) -> WorkerIdentity:
        """The identity a handshake announces."""
        return cls(
            hello.weights_fingerprint,
            hello.tokenizer_hash,
            hello.dtype,
            hello.numerics,
            hello.max_context,
            tuple(hello.eos_token_ids),
            MessageToString(hello.default_sampling, as_one_line=True),
        )

    def difference(self, other: WorkerIdentity) -> str:
        """The fields in which this one differs from `other`, with its own values, in words."""
        names = [field.name for field in fields(self)]
        unlike = [name for name in names if getattr(self, name) != getattr(other, name)]
        return ", ".join(f"{name.replace('_', ' ')} {str(getattr(self, name) or 'not named')[:200]}" for name in unlike)


class ServedModel(NamedTuple):
    """The served model."""

    hello: WorkerHello
    """Handshake of a worker that serves it."""
    identity: WorkerIdentity
    """Identity from `hello`; computed once, as every request carries it."""
    system_fingerprint: str
    """Hash of all that decides an answer besides the request, 32 hex digits; a client resumes an answer with it."""
    eos_token_ids: tuple[int, ...]
    """The worker's, and the tokenizer's if it has a chat template."""

    @classmethod
    def of(cls, hello: WorkerHello, text_fingerprint: str, chat_eos_id: int | None) -> ServedModel:
        """The identity from `hello`, behind a router whose `Tokenizer` has this fingerprint and this end of a turn."""
        identity = WorkerIdentity.of(hello)
        everything = hashlib.sha256(f"{identity!r} {text_fingerprint}".encode())
        eos_token_ids = identity.eos_token_ids
        if chat_eos_id is not None and chat_eos_id < hello.vocab_size and chat_eos_id not in eos_token_ids:
            eos_token_ids = (*eos_token_ids, chat_eos_id)
        return cls(hello, identity, everything.hexdigest()[:32], eos_token_ids)
