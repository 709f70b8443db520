"""Drafters attached to the verify worker: between two forwards they propose for every sequence that may go on alone.

A fault here costs a round its draft, never a stream. Knows sequences and drafters; knows no forwards and no links.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from betoken.common.economy.terms import DraftTerms, PriceTrials
from betoken.common.errors import InvalidArgumentError
from betoken.drafters import grammar
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.engine.verification import VerificationMode
from betoken.rpc.link.worker_load import SequenceKey
from betoken.verify_worker.feature_rows import CommittedRows, FeatureFeed
from betoken.verify_worker.sequence import AttachedRound, Block, VerifySequence

logger = logging.getLogger(__name__)

_GRAMMAR = grammar.SPEC.name
"""Drafter whose tokens, where it is attached, come before those of any other."""
_MAX_FAULTS = 3
"""Failed drafts of a sequence in a row; then it goes on without its drafter."""


@dataclass(slots=True)
class _Entry:
    """A sequence with its drafter."""

    seq: VerifySequence
    draft: DraftSequence
    drafter: Drafter
    asked_ns: int = 0
    """When its unanswered request was made (`time.perf_counter_ns`)."""
    max_tokens: int = 0
    """Most draft tokens it may be answered with."""
    late_ids: list[int] = field(default_factory=list)
    """Ids decided since the unanswered request."""
    late_rows: list[CommittedRows] = field(default_factory=list)
    """Features since then."""
    num_faults: int = 0
    """Failed drafts in a row."""
    num_unread: int = 0
    """Failures to take features in, in a row."""


class AttachedDrafters:
    """Drafters by name, and the sequences that have one."""

    def __init__(
        self,
        drafters: Mapping[str, Drafter],
        vocab_size: int = 0,
        max_draft_tokens: int = 0,
        feed: FeatureFeed | None = None,
    ) -> None:
        """`max_draft_tokens`: most of a block, where as many as pay are wanted. `feed`: what tells them features."""
        self._drafters = dict(drafters)
        self._vocab_size = vocab_size
        self._max_draft_tokens = max_draft_tokens
        self._feed = feed or FeatureFeed()
        self._entries: dict[SequenceKey, _Entry] = {}
        self._trials = {name: PriceTrials() for name in self._drafters}

    @property
    def has_sequences(self) -> bool:
        """Whether any open sequence has an attached drafter."""
        return bool(self._entries)

    @property
    def has_work(self) -> bool:
        """Whether a drafter has something to do, such as taking in a long prompt."""
        return bool(self._entries) and any(_has_work(drafter) for drafter in self._drafters.values())

    def open(self, seq: VerifySequence) -> None:
        """Give the sequence the drafter that it names.

        Raises:
            InvalidArgumentError: the drafter is not attached or refuses its settings.
        """
        drafter = self._drafters.get(seq.drafter)
        draft = DraftSequence(
            key=seq.key,
            params=replace(seq.params, num_logprobs=None),
            prompt_ids=seq.prompt_ids,
            output_ids=list(seq.output_ids),
            max_length=seq.max_length,
            settings=dict(seq.opened.drafter_settings),
            takes_trees=seq.mode is not VerificationMode.REJECTION,
            wants_probs=seq.mode is VerificationMode.REJECTION and seq.params.temperature > 0.0,
            draft_affects_output=seq.mode is not VerificationMode.COUPLED,
            predicted_ids=seq.opened.predicted_ids,
            rules=seq.rules,
            span=seq.span,
        )
        try:
            if drafter is None:
                raise InvalidArgumentError("drafter.name", seq.drafter, f"must be one of {', '.join(self._drafters)}")
            drafter.open(draft)
        except InvalidArgumentError:
            raise  # where the sequence goes on from another worker, its router opens it without
        except Exception:
            logger.exception("the attached drafter %s failed", seq.drafter)
        else:
            self._entries[seq.key] = _Entry(seq, draft, drafter)
            sources = self._drafters if isinstance(drafter, FusedDrafter) else (seq.drafter,)
            is_whole = any(self._feed.reads_whole_text(name, draft.draft_affects_output) for name in sources)
            seq.takes_pages = not is_whole

    def close(self, seq: VerifySequence) -> None:
        """Forget a sequence; unknown ones are ignored."""
        entry = self._entries.pop(seq.key, None)
        if entry is not None:
            seq.awaits_draft = False
            try:
                entry.drafter.close(entry.draft)
            except Exception:
                logger.exception("the attached drafter %s failed", seq.drafter)

    def commit(self, seq: VerifySequence, ids: list[int]) -> None:
        """The target decided `ids`."""
        entry = self._entries.get(seq.key)
        if entry is None:
            return
        self._trials[seq.drafter].add_tokens(len(ids))
        if entry.draft.is_waiting:  # its answer, at what is decided by now, is of no use
            entry.late_ids += ids
            return
        entry.draft.ids.extend(ids)
        entry.draft.output_ids.extend(ids)
        try:
            entry.drafter.commit(entry.draft, ids)
        except Exception:
            logger.exception("the attached drafter %s failed", seq.drafter)
            self._restart(entry)

    def observe(self, committed: CommittedRows) -> None:
        """Tell those that read features the rows of a forward, after what it decided."""
        readers = [name for name in self._drafters if self._feed.reads(name)]
        for entry in self._entries.values() if readers else ():
            is_read = any(self._view(entry, name) is not None for name in readers)
            if is_read and entry.draft.is_waiting and (rows := committed.alone(entry.seq.key)) is not None:
                entry.late_rows.append(rows)
        for name in readers:
            self._tell(name, [entry for entry in self._entries.values() if not entry.draft.is_waiting], committed)

    def propose(self, row_price: float) -> None:
        """Ask for all sequences whose next round is to have a draft. Each drafter does one unit of work, and its drafts
        become blocks of their sequences.

        `row_price`: tokens that a draft token has to bring to be worth verifying.
        """
        for entry in list(self._entries.values()):
            if entry.seq.wants_draft and not entry.draft.is_waiting:
                self._ask(entry, row_price)
        for name, drafter in self._drafters.items():
            self._step(name, drafter)
        self._fault_forgotten()
        for entry in self._entries.values():
            entry.seq.awaits_draft = entry.draft.is_waiting and entry.draft.draft_affects_output

    def check_integrity(self) -> None:
        """Re-derive what the drafters account for; raises when it is off."""
        for drafter in self._drafters.values():
            drafter.check_integrity()

    def _ask(self, entry: _Entry, row_price: float) -> None:
        seq, draft = entry.seq, entry.draft
        room = seq.max_length - seq.committed_length - 1
        if room <= 0:
            return
        is_priced = (
            seq.rounds.is_priced and not draft.draft_affects_output
        )  # a length that follows the clock would choose tokens
        entry.max_tokens = min(room, self._max_draft_tokens if is_priced else seq.rounds.num_draft_tokens)
        draft.terms = None
        if is_priced:
            draft.terms = self._trials[seq.drafter].terms(DraftTerms(entry.max_tokens, row_price))
        entry.asked_ns, draft.is_waiting = time.perf_counter_ns(), True
        if _GRAMMAR in self._drafters and (forced_ids := seq.rules.forced_ids(entry.max_tokens)):
            self._take(entry, Drafted(draft, forced_ids), _GRAMMAR)  # nobody has to guess them
            return
        try:
            entry.drafter.request(draft, min(room, seq.rounds.num_draft_tokens))
        except Exception:
            logger.exception("the attached drafter %s failed", seq.drafter)
            self._fault(entry)

    def _step(self, name: str, drafter: Drafter) -> None:
        own = [entry for entry in self._waiting() if entry.drafter is drafter]
        if not own and not _has_work(drafter):
            return
        try:
            for drafted in list(drafter.step()):
                entry = self._entries[drafted.sequence.key]
                if not entry.draft.is_waiting:
                    raise ValueError("a draft that nobody asked for")
                self._take(entry, drafted, name)
            bool(drafter.has_work)
        except Exception:
            logger.exception("the attached drafter %s failed", name)
            for entry in self._waiting():
                if entry.drafter is drafter or isinstance(entry.drafter, FusedDrafter):
                    self._fault(entry)

    def _fault_forgotten(self) -> None:
        """End the requests that no drafter is at any more."""
        if waiting := self._waiting():
            busy = [drafter for drafter in self._drafters.values() if _has_work(drafter)]
            for entry in waiting:
                if entry.drafter not in busy and not (busy and isinstance(entry.drafter, FusedDrafter)):
                    self._fault(entry)

    def _waiting(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.draft.is_waiting]

    def _take(self, entry: _Entry, drafted: Drafted, name: str) -> None:
        """`name`: who proposes it."""
        seq = entry.seq
        entry.draft.is_waiting = False
        if entry.late_ids:
            ids, entry.late_ids = entry.late_ids, []
            self.commit(seq, ids)
            self._tell_late(entry)
            return
        self._tell_late(entry)
        if not seq.wants_draft:  # the grant is over, or a block came from elsewhere
            return
        try:
            self._check(entry, drafted)
        except Exception:
            logger.exception("the attached drafter %s failed", seq.drafter)
            self._fault(entry)
            return
        entry.num_faults = 0
        if entry.draft.terms is not None:
            self._trials[seq.drafter].came(entry.draft.terms, len(drafted.draft_ids))
        sources = (name,) if drafted.sources is None else tuple(drafted.sources)
        seq.attached_round = AttachedRound(sources, time.perf_counter_ns() - entry.asked_ns, drafted.num_forwards)
        if drafted.draft_ids:
            probs = list(drafted.draft_probs) if entry.draft.wants_probs else []
            block = Block(drafted.draft_ids, drafted.parents or (), probs)
            if seq.rules.has_grammar and not probs:
                block.keep(seq.rules.allowed_nodes(block.draft_ids, block.parents or None))
            seq.block = block

    def _tell(self, name: str, entries: list[_Entry], committed: CommittedRows) -> None:
        views = [(entry, self._view(entry, name)) for entry in entries if entry.seq.key in committed.rows]
        told = [(entry, view) for entry, view in views if view is not None]
        try:
            if told:
                self._feed.tell(name, self._drafters[name], [view for _, view in told], committed)
            for entry, _ in told:
                entry.num_unread = 0
        except Exception:
            logger.exception("the attached drafter %s failed", name)
            for entry, _ in told:
                entry.num_unread += 1
                self._restart(entry)

    def _view(self, entry: _Entry, name: str) -> DraftSequence | None:
        """The sequence as this drafter knows it; None where it does not hold it."""
        if isinstance(entry.drafter, FusedDrafter):
            return entry.drafter.view(entry.draft, name)
        return entry.draft if entry.drafter is self._drafters[name] else None

    def _tell_late(self, entry: _Entry) -> None:
        late, entry.late_rows = entry.late_rows, []
        for rows in late:
            for name in self._drafters:
                if self._feed.reads(name):
                    self._tell(name, [entry], rows)

    def _check(self, entry: _Entry, drafted: Drafted) -> None:
        drafted.check()
        if len(drafted.draft_ids) > entry.max_tokens:
            raise ValueError(f"{len(drafted.draft_ids)} draft ids where {entry.max_tokens} were asked for")
        if max(drafted.draft_ids, default=0) >= self._vocab_size:
            raise ValueError(f"draft ids {drafted.draft_ids}: not all are below {self._vocab_size}")
        if drafted.parents is not None and not entry.draft.takes_trees:
            raise ValueError("a tree where a chain was asked for")

    def _fault(self, entry: _Entry) -> None:
        """The request is over without an answer."""
        entry.draft.is_waiting = False
        if entry.seq.wants_draft:
            entry.seq.attached_round = AttachedRound(is_failed=True)
        entry.num_faults += 1
        self._restart(entry)

    def _restart(self, entry: _Entry) -> None:
        """Let the drafter take the sequence in afresh, or go on without it."""
        self.close(entry.seq)
        if max(entry.num_faults, entry.num_unread) >= _MAX_FAULTS:
            logger.warning("a sequence goes on without the attached drafter %s", entry.seq.drafter)
            return
        entry.late_rows.clear()
        ids, entry.late_ids = entry.late_ids, []
        entry.draft.ids.extend(ids)
        entry.draft.output_ids.extend(ids)
        try:
            entry.drafter.open(entry.draft)
        except Exception:
            logger.exception("the attached drafter %s cannot take its sequence again", entry.seq.drafter)
        else:
            self._entries[entry.seq.key] = entry


def _has_work(drafter: Drafter) -> bool:
    try:
        return drafter.has_work
    except Exception:  # `step` is asked only for those that wait, and fails for them
        return False
