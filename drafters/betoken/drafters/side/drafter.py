"""Base of attached drafters that run layers on the target's hidden states, over the layers' own pages.

After each verification the layers process the accepted positions with their true states; KV written while drafting is
overwritten. One pass serves all drafting sequences. The drafter of a kind of layers adds what a draft is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from betoken.common.economy.acceptance import Calibration
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.drafters.settings import SequenceSettings
from betoken.drafters.shared_pages import IdlePages, SharedPages
from betoken.drafters.side.context import LayerContext
from betoken.drafters.side.pass_price import PassPrice
from betoken.drafters.side.sequence import Part, SideDraft, SideSequence
from betoken.engine.batch import Batch, Segment, build_batch

DraftT = TypeVar("DraftT", bound=SideDraft)

_MANY_ROWS = 64
"""A sequence with so many rows to take in is given a pass though it does not draft: a long prompt comes in chunks."""


class SideLayers(Protocol):
    """The layers of a drafter over their own paged KV."""

    def fuse(self, features: Tensor) -> Tensor:
        """Features [R, S, Ht] of the target -> [R, H], inputs of rows with known states; a separate tensor."""
        ...

    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Write the KV of the batch's rows, each with its `hidden` [R, H]; results of rows with logits [L, ...]."""
        ...


class SideDrafter(Generic[DraftT]):
    """Hosts layers for any number of sequences; a `FeatureReader`."""

    def __init__(
        self,
        forward: SideLayers,
        pages: SharedPages,
        state_columns: Sequence[int],
        max_rows: int,
        settings: SequenceSettings,
        make_context: Callable[..., LayerContext] = LayerContext,
    ) -> None:
        """Args:
        pages: pages of the layers' cache.
        state_columns: indices of the layers' states among the received features, in the layers' order.
        max_rows: most rows of a pass.
        settings: defaults of sequences without their own.
        """
        self._forward, self._pages, self._max_rows = forward, pages, max_rows
        self._columns = list(state_columns)
        self._settings, self._make_context = settings, make_context
        self._calibration = Calibration()
        self._price = PassPrice()
        self._sequences: dict[DraftSequence, SideSequence] = {}
        self._requests: dict[DraftSequence, int] = {}
        self._at_work: set[SideSequence] = set()
        pages.join(self)

    @property
    def has_work(self) -> bool:
        """Whether a draft is wanted, or a long text is to be taken in."""
        return bool(self._requests) or any(
            owner.context.num_pending >= _MANY_ROWS for owner in self._sequences.values()
        )

    def open(self, sequence: DraftSequence) -> None:
        """Take a sequence in, with its settings."""
        settings = self._settings.override(sequence.settings)
        context = self._make_context(sequence.ids, self._pages.table, self._pages.enter())
        self._sequences[sequence] = SideSequence(sequence, settings, context)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        """Learn the result of the last draft; `observe` receives the states of `ids`."""
        owner = self._sequences[sequence]
        self._price.add_tokens(len(ids))
        if owner.last is not None and not sequence.draft_affects_output:
            self._calibration.learn(*owner.last, ids)
        owner.last = None

    def observe(self, spans: Sequence[FeatureSpan], features: Tensor) -> None:
        """See `FeatureReader`."""
        in_order = self._columns == list(range(features.shape[1]))
        hidden = self._forward.fuse(features if in_order else features[:, self._columns])
        for span in spans:
            self._sequences[span.sequence].context.add_states(span.first_position, hidden[span.rows])

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        """Queue a draft; its size may follow the sequence's terms."""
        self._requests[sequence] = num_tokens

    def close(self, sequence: DraftSequence) -> None:
        """Forget the sequence; what it computed stays for others that begin alike."""
        self._requests.pop(sequence, None)
        owner = self._sequences.pop(sequence, None)
        if owner is not None:
            owner.context.forget()

    def step(self) -> list[Drafted]:
        """Process the received states, and answer every request: a draft is useful only before the next forward."""
        requests, self._requests = self._requests, {}
        if requests:
            self._price.begin_round(time.perf_counter_ns())
        # Before the first result it is chance whether the prompt is computed when a draft is requested.
        wanted = {seq: num for seq, num in requests.items() if seq.output_ids or not seq.draft_affects_output}
        drafts = [draft for seq, num in wanted.items() if (draft := self._begin(self._sequences[seq], num))]
        drafting = {draft.owner for draft in drafts}
        long = [
            owner
            for owner in self._sequences.values()
            if owner.context.num_pending >= _MANY_ROWS and owner not in drafting
        ]
        self._at_work = drafting.union(long)
        try:
            finished = {draft.owner.draft: self._finish(draft) for draft in self._draft(drafts, long)}
        finally:
            self._at_work = set()
        return [finished.get(seq) or Drafted(seq, []) for seq in requests]

    def page_lists(self) -> Iterator[list[int]]:
        """Page lists of every open sequence."""
        return (owner.context.page_ids for owner in self._sequences.values())

    def idle_pages(self) -> Iterator[IdlePages]:
        """Pages of sequences for which no draft is wanted."""
        for seq, owner in self._sequences.items():
            context = owner.context
            if context.page_ids and seq not in self._requests and owner not in self._at_work:
                yield IdlePages(context.order, context.idle_since_ns, context.page_ids, context.forget)

    def check_integrity(self) -> None:
        """Re-derive the page accounting of the layers; raises when it is off."""
        self._pages.check_integrity()

    def _begin(self, owner: SideSequence, num_tokens: int) -> DraftT | None:
        """An empty draft of at most `num_tokens`; None if nothing can be drafted."""
        raise NotImplementedError

    def _draft(self, drafts: list[DraftT], long: Sequence[SideSequence]) -> list[DraftT]:
        """Take in the rows of `long`, and complete the drafts; return the started ones, without drafts whose pages ran
        out."""
        raise NotImplementedError

    def _finish(self, draft: DraftT) -> Drafted:
        """The response of a complete draft."""
        raise NotImplementedError

    def _min_share(self, sequence: DraftSequence) -> float:
        """Least share of a path that pays off by the sequence's terms; 0 without terms."""
        return 0.0 if sequence.terms is None else self._calibration.share(sequence.terms.row_price)

    def _is_worth(self, sequence: DraftSequence, shares: Sequence[float]) -> bool:
        """Whether a draft of these shares of paths pays off by the sequence's terms."""
        terms = sequence.terms
        return terms is None or terms.is_worth([self._calibration.score(share) for share in shares])

    def _make_room(self, context: LayerContext, length: int) -> bool:
        """Give the sequence pages for so many slots, of others' if need be."""
        if not self._pages.make_room(context.order, context.page_ids, length):
            return False
        self._pages.table.extend(context.page_ids, length)
        return True

    def _rows(self, context: LayerContext, num_logits: int) -> list[Part]:
        """A context's next input, in parts that a pass holds."""
        first, ids, hidden = context.rows()
        parts = []
        for start in range(0, len(ids), self._max_rows):
            end = min(start + self._max_rows, len(ids))
            segment = Segment(context.page_ids, first + start, ids[start:end], num_logits if end == len(ids) else 0)
            parts.append(Part(segment, hidden[start:end]))
        return parts

    def _pass(self, parts: Sequence[Part], forward: SideLayers | None = None) -> tuple[Tensor, ...]:
        """Run the parts in their order, as many at a time as a pass holds; the results of all.

        `forward`: a part of the layers; None = all.
        """
        layers = forward or self._forward
        outputs: list[tuple[Tensor, ...]] = []
        first = 0
        while first < len(parts):
            end, num_rows = first, 0
            while end < len(parts) and num_rows + len(parts[end].segment.ids) <= self._max_rows:
                num_rows += len(parts[end].segment.ids)
                end += 1
                if end < len(parts) and parts[end].segment.page_ids is parts[end - 1].segment.page_ids:
                    break  # the next rows of the same sequence read what these write
            taken = parts[first:end]
            batch = build_batch([part.segment for part in taken], self._pages.table.page_size, self._max_rows)
            hidden = taken[0].hidden if len(taken) == 1 else torch.cat([part.hidden for part in taken])
            began_ns = time.perf_counter_ns()
            outputs.append(layers(batch, hidden))
            self._price.add_pass(time.perf_counter_ns() - began_ns)
            first = end
        if len(outputs) == 1:
            return outputs[0]
        return tuple(torch.cat(results) for results in zip(*outputs, strict=True))
