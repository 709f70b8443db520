"""Pieces of an answer as they stream: text, and its tokens with the source of each.

Built from protocol messages; knows nothing of calls or retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from betoken.client.from_message import from_message
from betoken.v1 import generation_pb2 as pb
from betoken.v1 import types_pb2


class TokenOrigin(StrEnum):
    """Why a token is in the answer."""

    ACCEPTED = "accepted"
    """A draft token the target agreed with."""
    RECOVERED = "recovered"
    """The target's token at the first rejected position."""
    BONUS = "bonus"
    """The target's token after a wholly accepted draft block."""
    PLAIN = "plain"
    """The target's token of a step without a draft."""
    UNKNOWN = "unknown"
    """An origin that this client does not know."""


_ORIGINS: Mapping[int, TokenOrigin] = {
    types_pb2.TOKEN_ORIGIN_ACCEPTED: TokenOrigin.ACCEPTED,
    types_pb2.TOKEN_ORIGIN_RECOVERED: TokenOrigin.RECOVERED,
    types_pb2.TOKEN_ORIGIN_BONUS: TokenOrigin.BONUS,
    types_pb2.TOKEN_ORIGIN_PLAIN: TokenOrigin.PLAIN,
}
_UNKNOWN_SOURCE = str(TokenOrigin.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the target's raw probabilities, before any sampling rule."""

    logprob: float
    """Logarithm of the token's own probability."""
    top: tuple[tuple[int, float], ...]
    """(id, logprob) of the most likely ids, most likely first."""

    @classmethod
    def from_proto(cls, message: types_pb2.TokenLogprobs) -> Logprobs:
        return cls(message.logprob, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


@dataclass(frozen=True, slots=True)
class Token:
    """One emitted token."""

    id: int
    """Vocabulary id."""
    origin: TokenOrigin
    """Why it is here."""
    source: str | None
    """Name of the drafter that proposed it, if it was accepted from a draft."""
    text: str
    """The text that became final with it; empty while a character or a possible stop string is incomplete."""
    logprobs: Logprobs | None
    """When asked for."""
    num_held_chars: int = 0
    """Characters of earlier text that were still held back before a special token; they are part of later tokens'
    text."""

    @property
    def provenance(self) -> str:
        """Source in one word: the drafter of an accepted token, else the origin."""
        return self.source if self.source is not None else str(self.origin)


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Durations of the parts of a round, or of a plain step; seconds."""

    num_tokens: int
    """Tokens it emitted."""
    num_draft_tokens: int
    """Draft tokens verified; 0 of a plain step."""
    num_accepted_tokens: int
    begin_s: float
    """From the request to the round's begin; of a resumed answer, from its last stream's."""
    duration_s: float
    """From its begin to its verification result."""
    draft_queue_s: float
    draft_forward_s: float
    verify_queue_s: float
    verify_forward_s: float

    @classmethod
    def from_proto(cls, message: pb.RoundTimes) -> RoundTimes:
        return from_message(cls, message)


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens of one round, and the text that became final with them. Prints as that text."""

    text: str
    """May lag behind the tokens; the texts of all pieces together are the answer."""
    tokens: tuple[Token, ...]
    """At least one; their texts form the piece's text."""
    rounds: tuple[RoundTimes, ...] = ()
    """Times of the tokens' rounds, where `report_rounds` asked for them."""
    answer: int = 0
    """Index of its answer, for requests with several answers (`n`)."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def from_proto(cls, message: pb.GenerateTokens) -> Piece:
        """Gives every token its share of the text; text that no token claims goes to the last one."""
        tokens: list[Token] = []
        start = 0
        for index, token in enumerate(message.tokens):
            is_last = index == len(message.tokens) - 1
            end = len(message.text) if is_last else start + token.num_chars
            tokens.append(_token(token, message.text[start:end]))
            start = end
        return cls(message.text, tuple(tokens), tuple(map(RoundTimes.from_proto, message.rounds)))


def _token(token: pb.GeneratedToken, text: str) -> Token:
    origin = _ORIGINS.get(token.origin, TokenOrigin.UNKNOWN)
    source = (token.source or _UNKNOWN_SOURCE) if origin is TokenOrigin.ACCEPTED else None
    logprobs = Logprobs.from_proto(token.logprobs) if token.HasField("logprobs") else None
    return Token(token.id, origin, source, text, logprobs, token.num_held_chars)
