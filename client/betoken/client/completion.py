"""The whole answer: text, tokens, usage, and what speculation did for it.

Built from protocol messages; knows nothing of calls or retries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from betoken.client.config import VerificationMode
from betoken.client.from_message import from_message
from betoken.client.modes import FROM_PROTO
from betoken.client.piece import Logprobs, Piece, RoundTimes, Token
from betoken.client.speculation_policy import SpeculationPolicy
from betoken.v1 import generation_pb2 as pb


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    """EOS, a stop id or a stop string."""
    LENGTH = "length"
    """max_new_tokens, or the context's end."""
    UNKNOWN = "unknown"


_FINISH_REASONS: Mapping[int, FinishReason] = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    output_tokens: int
    """Tokens of the answer, those received before a resumption included."""
    cached_prompt_tokens: int
    """Prompt tokens whose KV was reused and not computed; of the last stream only, when the answer was resumed."""


@dataclass(frozen=True, slots=True)
class DraftOutcomes:
    """Verified drafts of one length."""

    length: int
    """Draft tokens; of a tree its depth."""
    num_drafts_by_accepted: tuple[int, ...]
    """Drafts with exactly i accepted tokens, i from 0 to `length`."""


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """Speculation statistics; of the last stream only if the answer was resumed."""

    num_drafts: int
    """Draft blocks verified."""
    num_draft_tokens: int
    """Draft tokens verified, those beyond the answer's end included."""
    num_accepted_tokens: int
    """Draft tokens accepted into the answer."""
    num_accepted_per_position: tuple[int, ...]
    """Accepted at draft position i."""
    num_drafted_per_position: tuple[int, ...]
    """Verified at draft position i."""
    num_verify_forwards: int
    """Target forwards, plain steps included, prefill excluded."""
    num_emitted_tokens: int
    """Tokens of the answer that those forwards emitted."""
    draft_forward_s: float
    draft_queue_s: float
    verify_forward_s: float
    verify_queue_s: float
    round_s: float
    """Sum over rounds, from asking for a draft to the verification result."""
    num_failed_drafts: int
    """Draft blocks that were late, stale or failed."""
    num_failovers: int
    """Times the sequence was re-opened on another or restarted verify worker."""
    router_overhead_p50_s: float
    """Median over rounds of the time in neither worker."""
    num_rounds: int
    """Rounds that asked for a draft and got an answer, an empty one included."""
    first_draft_forward_s: float
    """Drafting time of the first round, with the drafter's prefill of the prompt; seconds."""
    num_draft_forwards: int
    """Forwards of the drafters' models, those between a draft and the next request included, prefill excluded."""
    num_accepted_prediction_tokens: int = 0
    """Accepted draft tokens out of what the request expects."""
    num_rejected_prediction_tokens: int = 0
    """Draft tokens out of it that were verified and not accepted."""
    num_failed_drafts_by_reason: Mapping[str, int] = field(default_factory=dict)
    """Failed drafts by reason: "timeout", "fault", "rejected", "full", "lost", "collapse"."""
    policy: SpeculationPolicy | None = None
    """State of the router's speculation policy at the answer's end; None without a drafter."""
    draft_outcomes: tuple[DraftOutcomes, ...] = ()
    """Verified drafts by length and accepted tokens; empty from a router that does not count them."""
    num_ahead_hits: int = 0
    """Drafts begun ahead, during the verification of the draft before (overlapped rounds)."""
    num_ahead_misses: int = 0
    """Drafts for another outcome than those drafted for ahead."""
    num_ahead_tokens: int = 0
    """Tokens drafted ahead, for all outcomes."""
    num_used_ahead_tokens: int = 0
    """Tokens drafted ahead that became part of a draft."""
    is_synthetic: bool = False
    """Whether a worker simulated its model: tokens, acceptance and times are made up."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted over verified draft tokens; 0 without drafts."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def ahead_hit_rate(self) -> float:
        """Share of drafts begun ahead among those the drafter could draft ahead for; 0 without overlapped rounds."""
        num_outcomes = self.num_ahead_hits + self.num_ahead_misses
        return self.num_ahead_hits / num_outcomes if num_outcomes else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Mean accepted prefix length of a draft block; 0 without drafts."""
        return self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0

    @property
    def draft_forwards_per_round(self) -> float:
        """Mean forwards of the drafter's models from one round's draft to the next; 0 without rounds."""
        return self.num_draft_forwards / self.num_rounds if self.num_rounds else 0.0

    @property
    def block_efficiency(self) -> float:
        """Emitted tokens per verify forward; 0 before the first one."""
        return self.num_emitted_tokens / self.num_verify_forwards if self.num_verify_forwards else 0.0

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share of accepted tokens at each draft position, among all draft tokens verified there."""
        pairs = zip(self.num_accepted_per_position, self.num_drafted_per_position, strict=False)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)

    @classmethod
    def from_proto(cls, message: pb.SpeculationStats) -> SpeculationStats:
        policy = from_message(SpeculationPolicy, message.policy) if message.HasField("policy") else None
        outcomes = tuple(from_message(DraftOutcomes, one) for one in message.draft_outcomes)
        return from_message(cls, message, policy=policy, draft_outcomes=outcomes)


@dataclass(frozen=True, slots=True)
class Detokenized:
    """Token ids as text. Prints as that text."""

    text: str
    """Text of all ids in order, without special tokens; bytes outside UTF-8 are U+FFFD."""
    pieces: tuple[bytes, ...]
    """Bytes of each id; a special token has the bytes of its name."""

    def __str__(self) -> str:
        return self.text

    @classmethod
    def from_proto(cls, message: pb.DetokenizeResponse) -> Detokenized:
        return from_message(cls, message)


@dataclass(frozen=True, slots=True)
class PartialAnswer:
    """The part of an answer that came before an error. Prints as its text.

    Another request can continue it: its prompt ids as prompt, and its seed, fingerprint and ids as `seed`,
    `system_fingerprint` and `resume_ids`. Ids that it was given come first.
    """

    text: str
    """Final text; a resumed answer begins with the missing text of its tokens."""
    tokens: tuple[Token, ...]
    """Tokens of this call; ids given as resume_ids are not repeated."""
    prompt_ids: tuple[int, ...]
    """The prompt as the model saw it."""
    seed: int
    model: str
    system_fingerprint: str

    def __str__(self) -> str:
        return self.text

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Ids of `tokens`."""
        return tuple(token.id for token in self.tokens)

    @classmethod
    def from_proto(cls, start: pb.GenerateStart, pieces: Sequence[Piece]) -> PartialAnswer:
        return from_message(
            cls,
            start,
            text="".join(piece.text for piece in pieces),
            tokens=tuple(token for piece in pieces for token in piece.tokens),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. Prints as its text."""

    text: str
    tokens: tuple[Token, ...]
    """Tokens of this call; ids given as resume_ids are not repeated."""
    finish_reason: FinishReason
    stop: str
    """The stop string that ended it, or empty."""
    usage: Usage
    speculation: SpeculationStats
    prompt_ids: tuple[int, ...]
    """The prompt as the model saw it."""
    seed: int
    """Seed that reproduces the tokens of the request; in modes other than COUPLED only with the same drafts."""
    model: str
    system_fingerprint: str
    """Hash of what decided the answer besides the request (weights, dtype, ...); a seed repeats under an equal one."""
    request_id: str
    """For the router's logs."""
    drafter: str
    """Name of the drafter in force; empty = plain decoding."""
    mode: VerificationMode
    """Verification mode in force."""
    num_resumes: int
    """Times the stream broke and was taken up again."""
    queue_s: float
    """Waiting for admission, as the router measured it."""
    time_to_first_token_s: float
    """As the router measured it; of the last stream when resumed."""
    duration_s: float
    """As the router measured it; of the last stream when resumed."""
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    """One per id of the prompt if requested, None for the first, which has no context. Empty if they
    were not, or where `resume_ids` were given, whose call had them."""
    rounds: tuple[RoundTimes, ...] = ()
    """Times of all rounds, if requested by `report_rounds`."""

    def __str__(self) -> str:
        return self.text

    @property
    def output_ids(self) -> tuple[int, ...]:
        """Ids of `tokens`."""
        return tuple(token.id for token in self.tokens)

    @classmethod
    def from_proto(
        cls,
        start: pb.GenerateStart,
        pieces: Sequence[Piece],
        finish: pb.GenerateFinish,
        num_resumes: int,
        prompt_logprobs: tuple[Logprobs | None, ...] = (),
    ) -> Completion:
        return from_message(
            cls,
            start,
            finish,
            text="".join(piece.text for piece in pieces),
            tokens=tuple(token for piece in pieces for token in piece.tokens),
            rounds=tuple(times for piece in pieces for times in piece.rounds),
            finish_reason=_FINISH_REASONS.get(finish.reason, FinishReason.UNKNOWN),
            usage=from_message(Usage, finish.usage),
            speculation=SpeculationStats.from_proto(finish.speculation),
            mode=FROM_PROTO.get(start.mode, VerificationMode.COUPLED),
            num_resumes=num_resumes,
            prompt_logprobs=prompt_logprobs,
        )
