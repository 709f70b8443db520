"""Between links and the verify core: validate and convert, hand over to the model thread, convert back.

No tensors, no policy.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from betoken.common.errors import InvalidArgumentError
from betoken.engine.rules.grammar import GrammarRule
from betoken.engine.rules.prompt import Prompt
from betoken.engine.sampler import TokenLogprob
from betoken.engine.sampler.verification import PAPERS_BOUNDS, TypicalBounds, VerificationMode
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.rpc.constraints import Grammars
from betoken.rpc.link import LinkPeer
from betoken.rpc.link.worker_entries import (
    EntryHandler,
    LinkResults,
    sequence_span,
)
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad
from betoken.rpc.sampling import sampling_fields
from betoken.rpc.validation import BlockLimits, validate_block, validate_frame, validate_open
from betoken.v1 import types_pb2 as pb
from betoken.v1.types_pb2 import OpenSequence, WorkerHello
from betoken.v1.verify_pb2 import (
    AttachedDraft,
    DraftBlock,
    PromptLogprobs,
    Stale,
    VerificationResult,
    VerifyLinkRequest,
    VerifyLinkResponse,
)
from betoken.verify_worker.commands import Grant, Open, Rounds, Verify, VerifyCommand
from betoken.verify_worker.prompt_logprobs import PromptPart
from betoken.verify_worker.sequence import AttachedDecision, Decision

MODES = {
    pb.VERIFICATION_MODE_COUPLED: VerificationMode.COUPLED,
    pb.VERIFICATION_MODE_REJECTION: VerificationMode.REJECTION,
    pb.VERIFICATION_MODE_TYPICAL: VerificationMode.TYPICAL,
}
"""Verification modes, as the links name them."""


class VerifyResults(LinkResults[VerifyLinkResponse]):
    """The core's sink: what was decided on the model thread, as frames."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(VerifyLinkResponse, delay_s)

    def decided(self, decisions: list[Decision], load: Callable[[], WorkerLoad]) -> None:
        self.send("results", [(decision.key, _result(decision)) for decision in decisions], load)

    def send_prompt_logprobs(self, parts: Sequence[PromptPart]) -> None:
        self.send("prompt_logprobs", [(part.key, _prompt_logprobs(part)) for part in parts])

    def stale(self, key: SequenceKey, length: int) -> None:
        self.send("stales", [(key, Stale(sequence_id=key[1], length=length))])


class VerifyLinkHandler(EntryHandler[VerifyCommand, VerifyLinkResponse]):
    """Takes the frames of all routers; called on the event loop."""

    def __init__(
        self,
        submit: Callable[[Sequence[VerifyCommand]], None],
        results: VerifyResults,
        hello: WorkerHello,
        grammars: Grammars | None = None,
    ) -> None:
        """`grammars` compiles constraints for the model's tokenizer; None = constraints are not supported."""
        super().__init__(submit, results)
        self._hello = hello
        self._grammars = grammars
        self._block_limits = BlockLimits(hello.vocab_size, hello.max_draft_tokens, hello.supports_trees)

    def frame(self, link: LinkPeer[Any], request: VerifyLinkRequest) -> None:
        """Blocks of one frame share a forward; opens apply before blocks, closes last."""
        validate_frame(request.opens, request.blocks, request.closes)
        self._arrived_ns = time.perf_counter_ns()
        self.submit(
            [
                *self.checked(link, request.opens, self._open),
                *self.checked(link, request.blocks, self._block),
                *self.closes(link, request.closes),
            ]
        )

    def _open(self, key: SequenceKey, entry: OpenSequence) -> Open | None:
        validate_open(entry, vocab_size=self._hello.vocab_size, max_context=self._hello.max_context)
        mode = entry.mode or pb.VERIFICATION_MODE_COUPLED
        if mode not in self._hello.verification_modes:
            offered = ", ".join(pb.VerificationMode.Name(mode) for mode in self._hello.verification_modes)
            raise InvalidArgumentError("open.mode", pb.VerificationMode.Name(mode), f"must be one of {offered}")
        if not entry.HasField("constraint"):
            return self._opening(key, entry, None, self._arrived_ns)
        grammars, arrived_ns = self._grammars, self._arrived_ns
        if grammars is None:
            raise InvalidArgumentError("open.constraint", "set", "must be absent, the tokenizer has no grammars")
        self.prepared(key, lambda: _grammar(grammars, entry), lambda rule: self._opening(key, entry, rule, arrived_ns))
        return None

    def _opening(self, key: SequenceKey, entry: OpenSequence, grammar: GrammarRule | None, arrived_ns: int) -> Open:
        mode = entry.mode or pb.VERIFICATION_MODE_COUPLED
        return Open(
            key=key,
            params=SamplingParams(**sampling_fields(entry)),
            prompt_ids=Prompt(entry.prompt_ids),
            output_ids=tuple(entry.committed_ids),
            max_length=entry.max_length,
            opened_ns=arrived_ns,
            mode=MODES[mode],
            bounds=_bounds(entry),
            grammar=grammar,
            drafter=entry.drafter.name,
            drafter_settings=dict(entry.drafter.settings),
            predicted_ids=Prompt(entry.predicted_ids),
            tenant=entry.tenant_hash,
            num_prompt_logprobs=entry.sampling.prompt_logprobs if entry.sampling.HasField("prompt_logprobs") else None,
            num_sent=entry.num_prompt_logprobs_sent,
            span=sequence_span(entry, "verify", self._hello.worker_id),
            deadline_s=time.monotonic() + entry.deadline_ms / 1000 if entry.deadline_ms else None,
        )

    def _block(self, key: SequenceKey, entry: DraftBlock) -> Verify | Grant:
        validate_block(entry, self._block_limits)
        if not entry.draft_ids:
            rounds = Rounds(entry.num_draft_tokens, entry.is_priced)
            num_tokens = max(1, entry.num_plain_steps)
            return Grant(key, entry.base_length, num_tokens, self._arrived_ns, rounds, entry.drafter)
        return Verify(
            key,
            entry.base_length,
            tuple(entry.draft_ids),
            self._arrived_ns,
            tuple(entry.parents),
            tuple(SparseProbs(list(sparse.token_ids), list(sparse.probs)) for sparse in entry.draft_probs),
            entry.num_plain_steps,
        )


def _bounds(entry: OpenSequence) -> TypicalBounds:
    """Bounds of typical acceptance, the paper's if the entry has none."""
    threshold = entry.posterior_threshold if entry.HasField("posterior_threshold") else PAPERS_BOUNDS.threshold
    alpha = entry.posterior_alpha if entry.HasField("posterior_alpha") else PAPERS_BOUNDS.alpha
    return TypicalBounds(threshold, alpha)


def _grammar(grammars: Grammars, entry: OpenSequence) -> GrammarRule:
    """The rule of a sequence's constraint, behind what is committed."""
    matcher = grammars.compile(entry.constraint, "open.constraint")
    rule = GrammarRule(matcher, grammars.vocab_size, entry.eos_token_ids, entry.committed_ids)
    if rule.fault:
        raise InvalidArgumentError("open.committed_ids", f"{len(entry.committed_ids)} tokens", rule.fault)
    return rule


def _prompt_logprobs(part: PromptPart) -> PromptLogprobs:
    message = PromptLogprobs(sequence_id=part.key[1], first_position=part.first_position)
    _add_logprobs(message.logprobs, part.logprobs)
    return message


def _add_logprobs(entries: Any, logprobs: Sequence[TokenLogprob]) -> None:
    for one in logprobs:
        entries.add(logprob=one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs)


def _result(decision: Decision) -> VerificationResult:
    result = VerificationResult(
        sequence_id=decision.key[1],
        base_length=decision.base_length,
        num_accepted=decision.num_accepted,
        next_id=decision.next_id,
        queue_ns=decision.queue_ns,
        forward_ns=decision.forward_ns,
        num_draft_tokens=decision.num_draft_tokens,
        cached_tokens=decision.num_cached_tokens,
    )
    if decision.attached is not None:
        result.attached.CopyFrom(_attached(decision.attached))
    elif decision.path is not None:
        result.path.extend(decision.path)
    _add_logprobs(result.logprobs, decision.logprobs)
    return result


def _attached(decision: AttachedDecision) -> AttachedDraft:
    return AttachedDraft(
        accepted_ids=decision.accepted_ids,
        sources=decision.sources,
        depth=decision.depth,
        is_exhausted=decision.is_exhausted,
        forward_ns=decision.forward_ns,
        num_forwards=decision.num_forwards,
        is_failed=decision.is_failed,
        num_predicted_tokens=decision.num_predicted_tokens,
    )
