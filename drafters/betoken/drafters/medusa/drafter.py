"""Medusa as drafter: from the state at the last decided token, every head's guesses, as a tree or a chain.

A head guesses whatever the guesses before it are, so one product over all drafting sequences gives whole trees. Guesses
are ranked with the target's own noise, if the target samples with it. Knows sequences and rows, not the target.
Source: Cai et al., "Medusa", arXiv:2401.10774.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from betoken.common.economy.terms import DraftTerms
from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.drafters.medusa.adapters import Adapter, AdapterStore
from betoken.drafters.medusa.choices import Branches, Node
from betoken.drafters.medusa.settings import MedusaSettings
from betoken.drafters.medusa.tree import Grown, Guesses, grow
from betoken.engine.sampler import SampleGroup, perturbed_top

logger = logging.getLogger(__name__)

SOURCE = "medusa"
"""Source name of its tokens: its spec's name."""

ERROR_SCALE = 0.6
"""Distance of a target's logits from a head's, for scoring drafts; calibration corrects it for each head."""

_WAIT_S = 0.001
"""Time in which a step waits for an adapter that is being read, if a sequence's tokens depend on its drafts."""


@dataclass(slots=True)
class _Sequence:
    """The state of one sequence."""

    settings: MedusaSettings
    adapter: Adapter | None
    choices: Node
    num_top: int
    """Guesses of a head that the choices take."""
    state: Tensor | None = None
    """[H] the target's state at `position`."""
    position: int = -1
    last: tuple[Grown, list[Guesses]] | None = None
    """The last draft, since which nothing was decided, and the heads' shares it was made of."""


class MedusaDrafter:
    """Answers each request from the sequence's last row. Settings: the fields of `MedusaSettings`."""

    def __init__(
        self, own: Adapter | None, store: AdapterStore, vocab_size: int, settings: MedusaSettings | None = None
    ) -> None:
        """`own`: the heads of sequences that name no adapter; without any these go without drafts."""
        self._own = own
        self._store = store
        self._vocab_size = vocab_size
        self._settings = settings or MedusaSettings()
        self._sequences: dict[DraftSequence, _Sequence] = {}
        self._requests: dict[DraftSequence, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def open(self, sequence: DraftSequence) -> None:
        settings = self._settings.override(sequence.settings)
        adapter = self._store.acquire(settings.adapter) if settings.adapter else self._own
        choices, num_top = settings.choices()
        if not sequence.takes_trees:
            choices, num_top = Branches(1), 1
        self._sequences[sequence] = _Sequence(settings, adapter, choices, num_top)

    def observe(self, spans: Sequence[FeatureSpan], features: Tensor) -> None:
        """Keep the last row of each sequence."""
        ends = torch.tensor([span.first_row + span.num_rows - 1 for span in spans], device=features.device)
        for span, state in zip(spans, features[ends, 0].unbind(), strict=True):
            entry = self._sequences[span.sequence]
            entry.state, entry.position = state, span.first_position + span.num_rows - 1

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        entry = self._sequences[sequence]
        last, entry.last = entry.last, None
        if last is not None and entry.adapter is not None:
            _learn(entry.adapter, *last, ids)

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        self._requests[sequence] = num_tokens

    def close(self, sequence: DraftSequence) -> None:
        self._requests.pop(sequence, None)
        entry = self._sequences.pop(sequence, None)
        if entry is not None and entry.settings.adapter and entry.adapter is not None:
            self._store.release(entry.adapter)

    def step(self) -> list[Drafted]:
        """Answer every request; a failing one does not affect other sequences."""
        self._store.look_after()
        self._await_adapters()
        requests = {seq: num for seq, num in self._requests.items() if not self._must_wait(seq)}
        for sequence in requests:
            del self._requests[sequence]
        groups: dict[Adapter, list[DraftSequence]] = {}
        for sequence in requests:
            entry = self._sequences[sequence]
            if self._has_row(sequence, entry) and entry.adapter is not None and entry.adapter.heads is not None:
                groups.setdefault(entry.adapter, []).append(sequence)
        drafted = {seq: Drafted(seq, []) for seq in requests}
        for adapter, sequences in groups.items():
            try:
                for one in self._draft(adapter, sequences, requests):
                    drafted[one.sequence] = one
            except Exception:
                logger.exception("the heads %r failed for %d sequences", adapter.name, len(sequences))
        return list(drafted.values())

    def check_integrity(self) -> None:
        self._store.check_integrity()

    def _await_adapters(self) -> None:
        for sequence in self._requests:
            if self._must_wait(sequence):
                adapter = self._sequences[sequence].adapter
                assert adapter is not None
                self._store.wait(adapter, _WAIT_S)
                return

    def _must_wait(self, sequence: DraftSequence) -> bool:
        """Whether an answer now would choose tokens by how fast an adapter is read."""
        adapter = self._sequences[sequence].adapter
        return sequence.draft_affects_output and adapter is not None and self._store.is_coming(adapter)

    @staticmethod
    def _has_row(sequence: DraftSequence, entry: _Sequence) -> bool:
        """Whether the state belongs to the last token but one, whose successor is decided."""
        # Before the first result it is chance whether the prompt is computed when the first draft is asked for.
        is_by_chance = sequence.draft_affects_output and not sequence.output_ids
        return entry.state is not None and entry.position == len(sequence.ids) - 2 and not is_by_chance

    def _draft(
        self, adapter: Adapter, sequences: Sequence[DraftSequence], requests: dict[DraftSequence, int]
    ) -> list[Drafted]:
        heads = adapter.heads
        assert heads is not None
        states = [state for seq in sequences if (state := self._sequences[seq].state) is not None]
        logits = heads.spread(heads.logits(torch.stack(states)).flatten(0, 1), self._vocab_size)
        groups = [_group(seq, head) for seq in sequences for head in range(heads.num_heads)]
        num_top = max(self._sequences[seq].num_top for seq in sequences)
        ids, log_shares = (rows.tolist() for rows in perturbed_top(logits, groups, num_top, ERROR_SCALE))
        drafted = []
        for index, sequence in enumerate(sequences):
            rows = slice(index * heads.num_heads, (index + 1) * heads.num_heads)
            guesses = [Guesses(*head) for head in zip(ids[rows], log_shares[rows], strict=True)]
            drafted.append(self._grow(sequence, adapter, guesses, requests[sequence]))
        return drafted

    def _grow(self, sequence: DraftSequence, adapter: Adapter, guesses: list[Guesses], num_tokens: int) -> Drafted:
        entry, terms = self._sequences[sequence], sequence.terms
        # A tree that follows calibration would influence tokens in modes in which they depend on drafts.
        exponents = [1.0 if sequence.draft_affects_output else one.exponent for one in adapter.calibrations]
        scored = [
            Guesses(head.token_ids, [exponent * log_share for log_share in head.log_scores])
            for head, exponent in zip(guesses, exponents, strict=True)
        ]
        grown = grow(
            scored,
            entry.choices,
            num_nodes=num_tokens if terms is None else terms.max_tokens,
            min_log_score=_log_price(terms),
            max_depth=min(entry.settings.max_depth or len(guesses), sequence.max_length - len(sequence.ids)),
            end_ids=sequence.end_ids,
        )
        if terms is not None and not terms.is_worth([math.exp(score) for score in grown.log_scores]):
            return Drafted(sequence, [], num_forwards=1)
        if not sequence.draft_affects_output:
            entry.last = grown, guesses
        return Drafted(sequence, grown.draft_ids, unless_chain(grown.parents), [SOURCE], num_forwards=1)


def _group(sequence: DraftSequence, head: int) -> SampleGroup:
    """The row of one head of one sequence."""
    params = sequence.params
    if sequence.draft_affects_output:  # the target does not choose with this noise there: the likeliest are the best
        params = replace(params, temperature=0.0)
    # A grammar allows what follows the output; further ahead it is not known what that is.
    rules = sequence.rules
    if rules is not None and rules.has_grammar and head > 0:
        rules = None
    return SampleGroup(params, sequence.prompt_ids, sequence.output_ids, (), rules, num_ahead=head)


def _log_price(terms: DraftTerms | None) -> float:
    return math.log(terms.row_price) if terms is not None and terms.row_price > 0.0 else -math.inf


def _learn(adapter: Adapter, grown: Grown, guesses: Sequence[Guesses], ids: Sequence[int]) -> None:
    """Follow the decided ids along a draft: which of the guesses at each place was right."""
    node, depth = -1, 0
    for index, draft_id in enumerate(grown.draft_ids):
        if grown.parents[index] != node or depth >= len(ids):
            continue
        is_accepted = draft_id == ids[depth]
        share = math.exp(guesses[depth].log_scores[grown.ranks[index]])
        if share > 0.0:
            adapter.calibrations[depth].observe(share, is_accepted)
        if is_accepted:
            node, depth = index, depth + 1
