"""A layer of the EAGLE family as attached drafter: it reads the target's states and drafts trees or chains.

After each result the layer processes the accepted positions with their true states; KV made from its own output
while drafting is overwritten. One pass serves all drafting sequences: first their new positions, then a level of each
one's tree after the other. Knows no target, no links and no forwards of the target's.
Source: Li et al., EAGLE-3, arXiv:2503.01840, and EAGLE-2, arXiv:2406.16858.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from betoken.common.tree import unless_chain
from betoken.drafters.drafter import Drafted
from betoken.drafters.eagle3.sequence import EagleDraft
from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.eagle3.tree import DynamicTree
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.side.choice import Children, Chooser
from betoken.drafters.side.drafter import SideDrafter, SideLayers
from betoken.drafters.side.sequence import Part, SideSequence

SOURCE = "eagle3"
"""Usual source name of its tokens: its spec's name."""


class EagleLayer(SideLayers, Protocol):
    """A layer whose output stands for the next hidden state: a pass gives scores [L, Vd] float32, and that [L, H]."""

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each of the draft's."""
        ...


class EagleDrafter(SideDrafter[EagleDraft]):
    """Hosts one layer for any number of sequences."""

    def __init__(
        self,
        forward: EagleLayer,
        pages: SharedPages,
        state_columns: Sequence[int],
        vocab_size: int,
        max_rows: int,
        settings: EagleSettings | None = None,
        source: str = SOURCE,
    ) -> None:
        """Args:
        pages: pages of the layer's cache.
        state_columns: indices of the layer's states among the received features, in the layer's order.
        vocab_size: ids of the target.
        max_rows: most rows of a pass.
        settings: defaults of sequences without their own.
        source: name of its tokens' source.
        """
        self._source = source
        super().__init__(forward, pages, state_columns, max_rows, settings or EagleSettings())
        self._chooser = Chooser(forward.target_ids, vocab_size)

    def _begin(self, owner: SideSequence, num_tokens: int) -> EagleDraft | None:
        """An empty draft; None if nothing can be drafted."""
        seq, terms = owner.draft, owner.draft.terms
        num_nodes = num_tokens if terms is None else terms.max_tokens
        if num_nodes < 1 or not owner.context.is_current:
            return None
        min_share = self._min_share(seq)
        tree = DynamicTree(
            num_nodes,
            owner.settings.max_branches if seq.takes_trees and not seq.wants_probs else 1,
            owner.settings.max_depth,
            end_ids=seq.end_ids,
            min_score=math.log(min_share) if min_share > 0.0 else -math.inf,
        )
        return EagleDraft(owner, tree)

    def _draft(self, drafts: list[EagleDraft], long: Sequence[SideSequence]) -> list[EagleDraft]:
        """Run passes until the drafts are complete; return the started ones, without drafts whose pages ran out."""
        begun, parts = [], []
        for owner in long:
            if self._make_room(owner.context, owner.context.num_rows):
                parts += self._rows(owner.context, num_logits=0)
            else:
                owner.context.forget()
        for draft in drafts:
            if self._make_room(draft.owner.context, draft.owner.context.num_rows):
                parts += self._rows(draft.owner.context, num_logits=1)
                begun.append(draft)
            else:
                draft.owner.context.forget()
        if parts:
            scores, fed_back = self._pass(parts)
            for owner in (*long, *(draft.owner for draft in begun)):
                owner.context.taken_in()
            self._grow(begun, scores, fed_back)
        return begun

    def _grow(self, drafts: Sequence[EagleDraft], scores: Tensor, fed_back: Tensor) -> None:
        """Hang the likeliest ids below the nodes that were asked, and ask the next levels, while there are any."""
        while drafts:
            self._add_children(drafts, scores)
            parts, rows, first_row = [], [], 0
            growing = []
            pays = sum(self._gain(draft) for draft in drafts) > self._price.price
            for draft in drafts:
                tree, num_asked = draft.tree, draft.num_asked
                if tree.level and (pays or not draft.is_priced) and self._make_room(draft.owner.context, draft.length):
                    rows += [first_row + place for place in tree.level_parents]
                    parts.append(draft.segment())
                    growing.append(draft)
                else:
                    tree.stop()
                first_row += num_asked
            drafts = growing
            if parts:
                index = torch.tensor(rows, device=fed_back.device)
                hidden = fed_back.index_select(0, index)
                offsets = [0, *accumulate(len(part.ids) for part in parts)]
                scores, fed_back = self._pass(
                    [Part(part, hidden[a:b]) for part, a, b in zip(parts, offsets, offsets[1:], strict=False)]
                )

    def _gain(self, draft: EagleDraft) -> float:
        """Tokens that one more pass may bring: as many of those it asks go on as went on before."""
        if not draft.is_priced:
            return 0.0
        before, draft.reach = draft.reach, sum(self._calibration.score(share) for share in draft.tree.level_shares)
        return draft.reach * min(1.0, draft.reach / before) if before > 0.0 else 0.0

    def _add_children(self, drafts: Sequence[EagleDraft], scores: Tensor) -> None:
        places = [(draft, node) for draft in drafts for node in draft.tree.level]
        groups = [draft.group(node) for draft, node in places]
        private = [row for row, (draft, _) in enumerate(places) if draft.owner.draft.wants_probs]
        children: dict[int, Children] = {}
        if private:
            sampled = self._chooser.sampled(scores[private], [groups[row] for row in private])
            for row, (token_id, probs) in zip(private, sampled, strict=True):
                places[row][0].probs.append(probs)
                children[row] = ([token_id], [0.0])
        shared = [row for row in range(len(places)) if row not in children]
        if shared:
            num_top = max(places[row][0].tree.max_branches for row in shared)
            rows = scores if not private else scores[shared]
            found = self._chooser.likeliest(rows, [groups[row] for row in shared], num_top)
            children |= zip(shared, found, strict=True)
        row = 0
        for draft in drafts:
            draft.num_asked = len(draft.tree.level)
            draft.num_passes += 1
            draft.tree.add([children[row + place] for place in range(draft.num_asked)])
            row += draft.num_asked

    def _finish(self, draft: EagleDraft) -> Drafted:
        owner, seq = draft.owner, draft.owner.draft
        owner.context.idle_since_ns = time.perf_counter_ns()
        draft_ids, parents, scores = draft.tree.best()
        shares = [math.exp(score) for score in scores]
        owner.last = (draft_ids, parents, shares)
        if not self._is_worth(seq, shares):
            return Drafted(seq, [], num_forwards=draft.num_passes)
        return Drafted(
            seq,
            draft_ids,
            unless_chain(parents),
            [self._source],
            draft_probs=draft.probs[: len(draft_ids)],
            num_forwards=draft.num_passes,
        )
