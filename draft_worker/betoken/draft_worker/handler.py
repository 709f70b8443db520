"""Between links and the draft core: validate and convert, hand over to the model thread, convert back.

Holds neither tensors nor policy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from betoken.common.economy.terms import DraftTerms
from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.core import DraftAnswer, DraftCore
from betoken.draft_worker.settings import DEFAULT_MAX_CONTEXT
from betoken.drafters.drafter import DraftSequence
from betoken.engine.rules.prompt import Prompt
from betoken.engine.sampling import SamplingParams
from betoken.rpc.link import LinkPeer
from betoken.rpc.link.worker_entries import (
    CoreCall,
    EntryHandler,
    LinkResults,
    SequenceKey,
    WorkerLoad,
    closing,
    sequence_span,
)
from betoken.rpc.sampling import sampling_fields
from betoken.rpc.validation import validate_commit, validate_draft_request, validate_frame, validate_open
from betoken.v1 import draft_pb2 as pb
from betoken.v1.draft_pb2 import Commit, DraftedBlock, DraftLinkRequest, DraftLinkResponse, DraftRequest
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_REJECTION,
    VERIFICATION_MODE_UNSPECIFIED,
    OpenSequence,
    SparseDistribution,
)

if TYPE_CHECKING:
    from betoken.engine.rules.sequence_rules import SequenceRules

RulesOf: TypeAlias = "Callable[[DraftSequence, OpenSequence], SequenceRules]"
"""Makes the rules of a sequence."""

# Ids and lengths are the target's. A drafter answers with an empty draft for a sequence it does not know or cannot
# hold.
ANY_VOCAB_SIZE = (1 << 31) - 1
ANY_CONTEXT = 1 << 31


class DraftResults(LinkResults[DraftLinkResponse]):
    """The core's sink: finished drafts as frames."""

    def __init__(self) -> None:
        super().__init__(DraftLinkResponse)

    def drafted(self, answers: list[DraftAnswer], load: Callable[[], WorkerLoad]) -> None:
        self.send("blocks", [(answer.key, _block(answer)) for answer in answers], load)


class DraftLinkHandler(EntryHandler[DraftCore, DraftLinkResponse]):
    """Takes the frames of all routers; called on the event loop."""

    def __init__(
        self,
        submit: Callable[[CoreCall[DraftCore]], None],
        results: DraftResults,
        max_draft_tokens: int,
        worker_id: str = "",
        max_context: int = DEFAULT_MAX_CONTEXT,
        rules_of: RulesOf | None = None,
    ) -> None:
        """Args:
        max_context: longest sequence taken, tokens; how long it may become is the target's to know.
        rules_of: makes the rules of a sequence, on a thread where it has a constraint; None = no model asks for them.
        """
        super().__init__(submit, results)
        self._worker_id = worker_id
        self._max_draft_tokens = max_draft_tokens
        self._max_context = max_context
        self._rules_of = rules_of

    def frame(self, link: LinkPeer[Any], request: DraftLinkRequest) -> None:
        """Opens apply first, then commits, then requests, closes last."""
        validate_frame(request.opens, request.commits, request.requests, request.closes)
        self._arrived_ns = time.perf_counter_ns()
        self.run(
            [
                *self.checked(link, request.opens, self._open),
                *self.checked(link, request.commits, self._commit),
                *self.checked(link, request.requests, self._request),
                *self.checked(link, request.closes, lambda key, entry: closing(key)),
            ]
        )

    def _open(self, key: SequenceKey, entry: OpenSequence) -> CoreCall[DraftCore] | None:
        self._check_length("open.prompt_ids", len(entry.prompt_ids) + len(entry.committed_ids))
        validate_open(entry, vocab_size=ANY_VOCAB_SIZE, max_context=ANY_CONTEXT)
        params = SamplingParams(**sampling_fields(entry))
        sequence = DraftSequence(
            key=key,
            params=dataclasses.replace(params, num_logprobs=None),
            prompt_ids=Prompt(entry.prompt_ids),
            output_ids=list(entry.committed_ids),
            max_length=entry.max_length,
            settings=dict(entry.drafter.settings),
            # A greedy draft is certain.
            wants_probs=entry.mode == VERIFICATION_MODE_REJECTION and params.temperature > 0.0,
            steers_tokens=entry.mode not in (VERIFICATION_MODE_UNSPECIFIED, VERIFICATION_MODE_COUPLED),
            deadline_s=time.monotonic() + entry.deadline_ms / 1000 if entry.deadline_ms else None,
        )
        name, rules_of = entry.drafter.name, self._rules_of

        def opening(rules: SequenceRules | None) -> CoreCall[DraftCore]:
            sequence.rules, sequence.span = rules, sequence_span(entry, "draft", self._worker_id)
            return lambda core: core.open(sequence, name)

        if rules_of is None or not entry.HasField("constraint"):
            return opening(rules_of(sequence, entry) if rules_of is not None else None)
        self.prepared(key, lambda: rules_of(sequence, entry), opening)
        return None

    def _commit(self, key: SequenceKey, entry: Commit) -> CoreCall[DraftCore]:
        self._check_length("commit.ids", entry.base_length + len(entry.ids))
        validate_commit(entry, vocab_size=ANY_VOCAB_SIZE, max_context=ANY_CONTEXT)
        base_length, ids = entry.base_length, list(entry.ids)
        return lambda core: core.commit(key, base_length, ids)

    def _check_length(self, field: str, num_tokens: int) -> None:
        if num_tokens > self._max_context:
            limit = f"must be at most {self._max_context} tokens with what came before (--max-context)"
            raise InvalidArgumentError(field, f"{num_tokens} tokens", limit)

    def _request(self, key: SequenceKey, entry: DraftRequest) -> CoreCall[DraftCore]:
        validate_draft_request(entry, max_draft_tokens=self._max_draft_tokens)
        num_tokens, takes_trees, arrived_ns = entry.num_tokens, entry.takes_trees, self._arrived_ns
        terms = _terms(entry.terms) if entry.HasField("terms") else None
        return lambda core: core.request(key, num_tokens, arrived_ns, takes_trees, terms)


def _terms(entry: pb.DraftTerms) -> DraftTerms:
    return DraftTerms(entry.max_tokens, entry.row_price, entry.min_gain)


def _block(answer: DraftAnswer) -> DraftedBlock:
    drafted = answer.drafted
    return DraftedBlock(
        sequence_id=answer.key[1],
        base_length=answer.base_length,
        ids=drafted.draft_ids,
        parents=() if drafted.parents is None else drafted.parents,
        sources=(answer.drafter_name,) if drafted.sources is None else drafted.sources,
        draft_probs=[
            SparseDistribution(token_ids=sparse.token_ids, probs=sparse.probs) for sparse in drafted.draft_probs
        ],
        queue_ns=answer.queue_ns,
        forward_ns=answer.forward_ns,
        num_forwards=drafted.num_forwards,
    )
