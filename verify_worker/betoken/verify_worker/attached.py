"""Attached drafters: between two forwards they draft for every sequence whose grant allows drafts.

A fault costs a round its draft, never a stream. Knows no forwards and no links.
"""

import logging
import time
from collections.abc import Mapping

from betoken.common.economy.terms import DraftTerms, PriceExploration
from betoken.common.errors import BetokenError, InvalidArgumentError
from betoken.drafters.drafter import Drafter, source_names
from betoken.drafters.host.feed import CommittedRows, FeatureFeed
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import Answer, HostedSequence, Request
from betoken.drafters.registry import SPECS
from betoken.rpc.link.worker_load import SequenceKey
from betoken.verify_worker.attached_draft import draft_sequence, take_draft
from betoken.verify_worker.commands import Grant
from betoken.verify_worker.sequence import VerifySequence

logger = logging.getLogger(__name__)

_MAX_FAULTS = 3
"""Consecutive failed drafts of a sequence, after which it goes on without its drafter."""


class AttachedDrafters:
    """Drafters by name, and the sequences that have one."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int = 0,
        max_draft_tokens: int = 0,
        feed: FeatureFeed | None = None,
    ) -> None:
        """`max_draft_tokens`: limit of adaptive draft lengths. `feed`: passes features to the drafters."""
        self.host = DrafterHost(drafters, self, vocab_size, _MAX_FAULTS, feed)
        self._drafters = drafters
        self._max_draft_tokens = max_draft_tokens
        self._sequences: dict[SequenceKey, tuple[VerifySequence, HostedSequence]] = {}
        self._trials = {name: PriceExploration() for name in drafters}

    @property
    def has_sequences(self) -> bool:
        """Whether any open sequence has an attached drafter."""
        return self.host.has_sequences

    @property
    def has_work(self) -> bool:
        """Whether a drafter has something to do, such as computing a long prompt."""
        return self.host.has_work

    def open(self, seq: VerifySequence) -> None:
        """Open the sequence in the drafter that it names; after a fault it goes on without.

        Raises:
            InvalidArgumentError: the drafter is not attached or refuses its settings.
        """
        try:
            hosted = self.host.open(draft_sequence(seq, self._lag(seq.drafter)), seq.drafter)
        except InvalidArgumentError:
            raise  # if the sequence continues from another worker, its router opens it without a drafter
        except BetokenError as error:
            logger.warning("a sequence goes on without the drafter %s: %s", seq.drafter, error)
        else:
            self._sequences[seq.key] = seq, hosted
            seq.takes_pages = not self.host.reads_whole_text(hosted)

    def refusal(self, seq: VerifySequence, grant: Grant) -> InvalidArgumentError | None:
        """The reason why a sequence cannot have these rounds; None if it can."""
        names = self.host.names
        if grant.drafter and grant.drafter not in names:
            limit = f"must be one of {', '.join(names)}" if names else "must be empty, no drafter is attached"
            return InvalidArgumentError("block.drafter", grant.drafter, limit)
        num_draft_tokens = grant.rounds.num_draft_tokens
        if num_draft_tokens and not (grant.drafter or seq.drafter):
            limit = "must be 0, as the sequence has no attached drafter"
            return InvalidArgumentError("block.num_draft_tokens", num_draft_tokens, limit)
        return None

    def change(self, seq: VerifySequence, name: str) -> None:
        """Draft for an open sequence with another attached drafter; if that rejects it, it goes on without."""
        self.close(seq)
        seq.drafter, seq.takes_pages = name, True
        try:
            self.open(seq)
        except InvalidArgumentError as error:
            logger.warning("a sequence goes on without the drafter %s: %s", name, error)

    def close(self, seq: VerifySequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        if (found := self._sequences.pop(seq.key, None)) is not None:
            seq.awaits_draft = False
            self.host.close(found[1])

    def commit(self, seq: VerifySequence, ids: list[int]) -> None:
        """The target decided `ids`."""
        if (hosted := self.host.find(seq.key)) is not None:
            self._trials[seq.drafter].add_tokens(len(ids))
            self.host.commit(hosted, ids)

    def observe(self, committed: CommittedRows) -> None:
        """Pass the features of a forward to the drafters that read them, after its decisions were committed."""
        self.host.observe(committed)

    def propose(self, row_price: float) -> None:
        """Request drafts for all sequences that want one; make finished drafts the blocks of their sequences.

        `row_price`: price of verifying a draft token, in tokens.
        """
        for seq, hosted in list(self._sequences.values()):
            if seq.wants_draft and not hosted.requests and hosted.is_held:
                self._request(seq, hosted, row_price)
        self.host.step()
        for seq, hosted in self._sequences.values():
            seq.awaits_draft = hosted.at_work is not None and hosted.sequence.draft_affects_output

    def drafted(self, answers: list[Answer]) -> None:
        """See `HostSink`."""
        for answer in answers:
            seq, terms = self._sequences[answer.key][0], answer.request.terms
            if seq.wants_draft and take_draft(seq, answer) and terms is not None:
                self._trials[seq.drafter].came(terms, len(answer.drafted.draft_ids))

    def lost(self, hosted: HostedSequence) -> None:
        """See `HostSink`."""

    def check_integrity(self) -> None:
        """Check the accounting of the drafters; raises if it is wrong."""
        self.host.check_integrity()

    def _lag(self, name: str) -> bool:
        """Whether drafts may take several forwards, between which the target commits."""
        drafter = self._drafters.get(name)
        names = (name,) if drafter is None else (name, *source_names(drafter))
        return any(other in SPECS and SPECS[other].runs_model for other in names)

    def _request(self, seq: VerifySequence, hosted: HostedSequence, row_price: float) -> None:
        room = seq.max_length - seq.committed_length - 1
        if room <= 0:
            return
        # A length that follows the clock would change tokens that depend on drafts.
        is_priced = seq.rounds.is_priced and not hosted.sequence.draft_affects_output
        max_tokens = min(room, self._max_draft_tokens if is_priced else seq.rounds.num_draft_tokens)
        terms = self._trials[seq.drafter].terms(DraftTerms(max_tokens, row_price)) if is_priced else None
        num_tokens, now_ns = min(room, seq.rounds.num_draft_tokens), time.perf_counter_ns()
        self.host.request(hosted, Request(num_tokens, max_tokens, hosted.sequence.takes_trees, terms, now_ns))
