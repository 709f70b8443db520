"""Gemma-4 assistants as attached drafters: each pass gives the next token of every draft, as chains.

A pass reads the target's KV of the accepted positions, at one constant position, and writes none: a rejected draft
leaves no trace. Knows no target's forwards and no links.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from betoken.common.errors import FailedPreconditionError
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.gemma4_assistant.forward import AssistantForward
from betoken.drafters.gemma4_assistant.settings import Gemma4AssistantSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.choice import Chooser
from betoken.drafters.side.context import LayerContext
from betoken.drafters.side.parallel_draft import ParallelDraft, choose_chains
from betoken.drafters.side.parallel_drafter import ChainDrafter
from betoken.drafters.side.pass_price import PassPrice
from betoken.drafters.side.sequence import SideSequence
from betoken.engine.batch import Segment, build_batch
from betoken.engine.page_table import PageTable
from betoken.engine.side.forward import TargetKeys


@dataclass(slots=True, eq=False)
class StateContext(LayerContext):
    """The target's last known state alone: the layers keep no KV."""

    position: int = -1
    """Position of the state."""

    @property
    def is_current(self) -> bool:
        """Whether the state belongs to the position before the last id."""
        return self.last is not None and self.position == len(self.ids) - 2

    def add_states(self, first_position: int, hidden: Tensor) -> None:
        """Keep the last of the states [n, H] of positions from `first_position` on."""
        self.last, self.position = hidden[-1:].clone(), first_position + len(hidden) - 1


class Gemma4AssistantDrafter(ChainDrafter):
    """Hosts one assistant for any number of sequences."""

    source = "gemma4_assistant"
    _forward: AssistantForward

    def __init__(self, forward: AssistantForward, settings: Gemma4AssistantSettings | None = None) -> None:
        """`settings`: defaults of sequences without their own."""
        pages = SharedPages(PageTable(1, 1))  # never taken: the layers write no keys
        super().__init__(forward, pages, [0], 1, settings or Gemma4AssistantSettings(), StateContext)
        self._chooser = Chooser(forward.target_ids, forward.vocab_size)

    def open(self, sequence: DraftSequence) -> None:
        """Take a sequence in, with its settings.

        Raises:
            FailedPreconditionError: the target's KV of the sequence cannot be read.
        """
        if sequence.target_kv is None:
            raise FailedPreconditionError(f"the drafter {self.source} needs a sequence whose KV in the target it reads")
        super().open(sequence)

    def step(self) -> list[Drafted]:
        """Answer every request but those whose draft must not depend on a preemption of their sequence."""
        waiting = {seq: num for seq, num in self._requests.items() if self._must_wait(seq)}
        for seq in waiting:
            del self._requests[seq]
        try:
            return super().step()
        finally:
            self._requests |= waiting

    def _begin(self, owner: SideSequence, num_tokens: int) -> ParallelDraft | None:
        seq, terms = owner.draft, owner.draft.terms
        num_wanted = min(num_tokens if terms is None else terms.max_tokens, owner.settings.max_depth)
        if num_wanted < 1 or not owner.context.is_current or not _has_kv(seq):
            return None
        return ParallelDraft(owner, num_wanted, self._min_share(seq))

    def _draft(self, drafts: list[ParallelDraft], long: Sequence[SideSequence]) -> list[ParallelDraft]:
        if drafts:
            price = self._calibration.share(min(1.0, self._price.price / len(drafts)))
            for draft in drafts:
                if draft.owner.draft.terms is not None:
                    draft.min_share = max(draft.min_share, price)
            choose_chains(drafts, _Passes(self._forward, drafts, self._price), self._chooser, follows=True)
        return drafts

    @staticmethod
    def _must_wait(sequence: DraftSequence) -> bool:
        """Whether the KV is to be computed again before a draft that tokens depend on."""
        return sequence.draft_affects_output and bool(sequence.output_ids) and not _has_kv(sequence)


class _Passes:
    """Scores of the next tokens of drafts, a pass of the assistant for all; see `ScoreRows`."""

    def __init__(self, forward: AssistantForward, drafts: Sequence[ParallelDraft], price: PassPrice) -> None:
        self._forward, self._drafts, self._price = forward, drafts, price
        self._keys = [_keys_of(draft.owner.draft) for draft in drafts]
        self._hidden = torch.cat([_state_of(draft) for draft in drafts])
        """[N, Ht] the target's states, then what stands for them."""

    def __call__(self, rows: list[int], owners: list[int], previous: list[int]) -> tuple[Tensor, None]:
        batch = build_batch([Segment((0,), 0, [token_id], 1) for token_id in previous], 1, len(previous))
        began_ns = time.perf_counter_ns()
        scores, states = self._forward(batch, self._hidden[owners], [self._keys[owner] for owner in owners])
        self._price.add_pass(time.perf_counter_ns() - began_ns)
        self._hidden[owners] = states
        for owner in owners:
            self._drafts[owner].num_passes += 1
        return scores, None


def _state_of(draft: ParallelDraft) -> Tensor:
    state = draft.owner.context.last
    assert state is not None, "a draft begins with a known state"
    return state


def _keys_of(sequence: DraftSequence) -> TargetKeys:
    """The target's keys of all positions before the last id's, which no forward has read yet."""
    assert sequence.target_kv is not None, "such a sequence was refused"
    return TargetKeys(*sequence.target_kv())


def _has_kv(sequence: DraftSequence) -> bool:
    """Whether the target holds these keys: not after a preemption, until they are computed again."""
    return 0 < _keys_of(sequence).length == len(sequence.ids) - 1
