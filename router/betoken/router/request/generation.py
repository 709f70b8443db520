"""One validated generation request, and the part of it that is sent to workers.

Built by `intake`, and by probes of draft workers; from here on every field is resolved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from betoken.router.policy.account import Account
from betoken.router.request.worker_identity import WorkerIdentity
from betoken.router.text.answer import StopRules
from betoken.v1.types_pb2 import Constraint, DrafterChoice, OpenSequence, SamplingParams, VerificationMode

AUTO_DRAFTER = "auto"
_WAITING_SHARE = 0.9
_TENANT_HASH_BYTES = 16


def waiting_s(most_s: float, left_s: float | None) -> float:
    """Return the longest wait if `left_s` remain until the deadline (None = no deadline). A tenth of it is reserved for
    sending the error."""
    return most_s if left_s is None else min(most_s, _WAITING_SHARE * left_s)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One request for an answer, in the router's terms."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    """Every field set, the seed included."""
    mode: VerificationMode
    eos_token_ids: tuple[int, ...]
    max_length: int
    """Largest prompt + output, tokens; the model's context at most."""
    model: str = ""
    """The name under which the client asked for it, or the model's id."""
    identity: WorkerIdentity | None = None
    """Identity of the verify workers whose limits and defaults were applied: only they may answer. None = any."""
    system_fingerprint: str = ""
    """Hash of all that decides the answer besides the request, for the client to resume with."""
    resume_ids: Sequence[int] = ()
    """Output ids the client has already."""
    num_received_logprobs: int = 0
    """Entries of the prompt's logprobs that the client has already."""
    constraint: Constraint | None = None
    """Constraint on the output; None = none."""
    predicted_ids: Sequence[int] = ()
    """Predicted output; empty = none."""
    posterior_threshold: float | None = None
    """Bounds of typical acceptance; None = the paper's."""
    posterior_alpha: float | None = None
    drafter: DrafterChoice | None = None
    """None: decode without speculation. `auto`: the fastest at present."""
    is_resumed: bool = False
    """Whether it resumes a broken stream, even one without a token."""
    is_further: bool = False
    """Another answer of the same reply has begun before it."""
    is_drafter_fixed: bool = False
    """The client named the drafter: no other will do."""
    num_draft_tokens: int = 0
    """Draft tokens per round; 0 = adaptive."""
    reports_rounds: bool = False
    """Whether the times of each round are reported."""
    tenant: str = ""
    accounts: Sequence[Account] = ()
    """Accounts whose limits it counts against."""
    traceparent: str = ""
    deadline_s: float | None = None
    """`time.monotonic()` value after which the answer is of no use; None = none."""
    received_ns: int = field(default_factory=time.perf_counter_ns)
    """`time.perf_counter_ns()` when it came, not tokenized yet."""

    @property
    def left_s(self) -> float | None:
        """Seconds until its deadline; None = the request has none."""
        return None if self.deadline_s is None else self.deadline_s - time.monotonic()

    @property
    def is_auto(self) -> bool:
        """Whether the drafter is chosen among all of the workers, by speed."""
        return self.drafter is not None and self.drafter.name == AUTO_DRAFTER

    def with_drafter(self, name: str) -> GenerationRequest:
        """The request with a drafter that was chosen for it; empty = none."""
        return replace(self, drafter=DrafterChoice(name=name) if name else None) if self.is_auto else self

    @property
    def has_begun(self) -> bool:
        """Whether the client has heard of it before, so that what workers here lack costs drafts and no answer."""
        has_some = bool(self.resume_ids) or self.num_received_logprobs > 0
        return has_some or self.is_resumed or self.is_further

    @property
    def num_prompt_logprobs(self) -> int:
        """Entries of the prompt's logprobs that the client wants in all: one for each token but the first."""
        return len(self.prompt_ids) - 1 if self.sampling.HasField("prompt_logprobs") else 0

    def stop_rules(self, special_names: Mapping[int, str]) -> StopRules:
        """Conditions that end the answer; `special_names` are the tokenizer's special tokens by their ids."""
        end_ids = frozenset(self.sampling.stop_token_ids)
        if not self.sampling.ignore_eos:
            end_ids |= frozenset(self.eos_token_ids)
        return StopRules(
            end_ids=end_ids,
            # A grammar that allows nothing else ends the answer before min_new_tokens too.
            early_end_ids=frozenset(self.eos_token_ids if self.constraint is not None else ()),
            stop_strings=tuple(self.sampling.stop),
            min_new_tokens=self.sampling.min_new_tokens,
            max_new_tokens=self.max_length - len(self.prompt_ids),
            special_names=special_names,
        )

    def open_entry(
        self,
        sequence_id: int,
        committed_ids: Sequence[int],
        drafter: DrafterChoice | None = None,
        *,
        is_predicting: bool = False,
        num_received_logprobs: int | None = None,
    ) -> OpenSequence:
        """The link entry that opens, or re-opens, this sequence with the output decided so far; `drafter`: of
        this worker, which looks up predictions or not; `num_received_logprobs`: as the field, by now, None = all."""
        entry = OpenSequence(
            sequence_id=sequence_id,
            prompt_ids=self.prompt_ids,
            committed_ids=committed_ids,
            sampling=self.sampling,
            mode=self.mode,
            posterior_threshold=self.posterior_threshold,
            posterior_alpha=self.posterior_alpha,
            eos_token_ids=self.eos_token_ids,
            max_length=max(self.max_length, len(self.prompt_ids) + len(committed_ids) + 1),
            traceparent=self.traceparent,
            drafter=drafter,
            constraint=self.constraint,
            predicted_ids=self.predicted_ids if is_predicting else (),
            tenant_hash=sha256(self.tenant.encode()).digest()[:_TENANT_HASH_BYTES],
        )
        if num_received_logprobs is not None and num_received_logprobs < self.num_prompt_logprobs:
            entry.num_prompt_logprobs_sent = num_received_logprobs
        else:
            entry.sampling.ClearField("prompt_logprobs")
        if (left_s := self.left_s) is not None:
            entry.deadline_ms = max(1, round(left_s * 1000))
        return entry
