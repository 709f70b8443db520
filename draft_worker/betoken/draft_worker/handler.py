"""Between links and the draft core: validate and convert, hand over to the model thread, convert back.

Holds neither tensors nor policy.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from betoken.common.economy.terms import DraftTerms
from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.commands import Commit, DraftCommand, Open, RequestDraft
from betoken.draft_worker.settings import DEFAULT_MAX_CONTEXT
from betoken.drafters.host.hosted import Answer
from betoken.engine.rules.prompt import Prompt
from betoken.engine.sampling import SamplingParams
from betoken.rpc.link import LinkPeer
from betoken.rpc.link.worker_entries import (
    EntryHandler,
    LinkResults,
    sequence_span,
)
from betoken.rpc.link.worker_load import SequenceKey, WorkerLoad
from betoken.rpc.sampling import sampling_fields
from betoken.rpc.validation import validate_commit, validate_draft_request, validate_frame, validate_open
from betoken.v1 import draft_pb2 as pb
from betoken.v1.draft_pb2 import DraftedBlock, DraftLinkRequest, DraftLinkResponse, DraftRequest
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_REJECTION,
    VERIFICATION_MODE_UNSPECIFIED,
    OpenSequence,
    SparseDistribution,
)

if TYPE_CHECKING:
    from betoken.engine.rules.grammar import GrammarRule

GrammarOf: TypeAlias = "Callable[[OpenSequence], GrammarRule | None]"
"""Makes the grammar of a sequence's constraint; None = its models draft without."""

# Ids and lengths are the target's. A drafter answers with an empty draft for a sequence it does not know or cannot
# hold.
ANY_VOCAB_SIZE = (1 << 31) - 1
ANY_CONTEXT = 1 << 31


class DraftResults(LinkResults[DraftLinkResponse]):
    """The core's sink: finished drafts as frames."""

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(DraftLinkResponse, delay_s)

    def drafted(self, answers: list[Answer], load: Callable[[], WorkerLoad]) -> None:
        self.send("blocks", [(answer.key, _block(answer)) for answer in answers], load)


class DraftLinkHandler(EntryHandler[DraftCommand, DraftLinkResponse]):
    """Takes the frames of all routers; called on the event loop."""

    def __init__(
        self,
        submit: Callable[[Sequence[DraftCommand]], None],
        results: DraftResults,
        max_draft_tokens: int,
        worker_id: str = "",
        max_context: int = DEFAULT_MAX_CONTEXT,
        grammar_of: GrammarOf | None = None,
    ) -> None:
        """Args:
        max_context: longest sequence taken, tokens; how long it may become is the target's to know.
        grammar_of: makes the grammar of a constraint, on a thread; None = no model asks for one.
        """
        super().__init__(submit, results)
        self._worker_id = worker_id
        self._max_draft_tokens = max_draft_tokens
        self._max_context = max_context
        self._grammar_of = grammar_of

    def frame(self, link: LinkPeer[Any], request: DraftLinkRequest) -> None:
        """Opens apply first, then commits, then requests, closes last."""
        validate_frame(request.opens, request.commits, request.requests, request.closes)
        self._arrived_ns = time.perf_counter_ns()
        self.submit(
            [
                *self.checked(link, request.opens, self._open),
                *self.checked(link, request.commits, self._commit),
                *self.checked(link, request.requests, self._request),
                *self.closes(link, request.closes),
            ]
        )

    def _open(self, key: SequenceKey, entry: OpenSequence) -> Open | None:
        self._check_length("open.prompt_ids", len(entry.prompt_ids) + len(entry.committed_ids))
        validate_open(entry, vocab_size=ANY_VOCAB_SIZE, max_context=ANY_CONTEXT)
        deadline_s = time.monotonic() + entry.deadline_ms / 1000 if entry.deadline_ms else None
        grammar_of = self._grammar_of
        if grammar_of is None or not entry.HasField("constraint"):
            return self._opening(key, entry, deadline_s, None)
        self.prepared(key, lambda: grammar_of(entry), lambda grammar: self._opening(key, entry, deadline_s, grammar))
        return None

    def _opening(
        self, key: SequenceKey, entry: OpenSequence, deadline_s: float | None, grammar: GrammarRule | None
    ) -> Open:
        params = SamplingParams(**sampling_fields(entry))
        return Open(
            key=key,
            params=dataclasses.replace(params, num_logprobs=None),
            prompt_ids=Prompt(entry.prompt_ids),
            output_ids=tuple(entry.committed_ids),
            max_length=entry.max_length,
            drafter=entry.drafter.name,
            settings=dict(entry.drafter.settings),
            # A greedy draft is certain.
            wants_probs=entry.mode == VERIFICATION_MODE_REJECTION and params.temperature > 0.0,
            draft_affects_output=entry.mode not in (VERIFICATION_MODE_UNSPECIFIED, VERIFICATION_MODE_COUPLED),
            deadline_s=deadline_s,
            grammar=grammar,
            predicted_ids=Prompt(entry.predicted_ids),
            tenant=entry.tenant_hash,
            span=sequence_span(entry, "draft", self._worker_id),
        )

    def _commit(self, key: SequenceKey, entry: pb.Commit) -> Commit:
        self._check_length("commit.ids", entry.base_length + len(entry.ids))
        validate_commit(entry, vocab_size=ANY_VOCAB_SIZE, max_context=ANY_CONTEXT)
        return Commit(key, entry.base_length, tuple(entry.ids))

    def _check_length(self, field: str, num_tokens: int) -> None:
        if num_tokens > self._max_context:
            limit = f"must be at most {self._max_context} tokens with what came before (--max-context)"
            raise InvalidArgumentError(field, f"{num_tokens} tokens", limit)

    def _request(self, key: SequenceKey, entry: DraftRequest) -> RequestDraft:
        validate_draft_request(entry, max_draft_tokens=self._max_draft_tokens, vocab_size=ANY_VOCAB_SIZE)
        terms = _terms(entry.terms) if entry.HasField("terms") else None
        how = (entry.num_tokens, self._arrived_ns, entry.takes_trees, terms, entry.num_outcomes)
        return RequestDraft(key, entry.base_length, entry.next_id, *how)


def _terms(entry: pb.DraftTerms) -> DraftTerms:
    return DraftTerms(entry.max_tokens, entry.row_price, entry.min_gain)


def _block(answer: Answer) -> DraftedBlock:
    drafted = answer.drafted
    return DraftedBlock(
        sequence_id=answer.key[1],
        base_length=answer.request.key[0],
        next_id=answer.request.key[1],
        ids=drafted.draft_ids,
        parents=() if drafted.parents is None else drafted.parents,
        sources=answer.sources,
        draft_probs=[
            SparseDistribution(token_ids=sparse.token_ids, probs=sparse.probs) for sparse in drafted.draft_probs
        ],
        queue_ns=answer.queue_ns,
        forward_ns=answer.forward_ns,
        num_forwards=drafted.num_forwards,
        num_ahead_ids=drafted.num_ahead_ids,
        num_ahead_tokens=drafted.num_ahead_tokens,
        is_ahead=answer.is_ahead,
    )
