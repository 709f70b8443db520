"""Parallel drafts: one forward of a model gives all tokens of a draft.

The forward holds the committed ids without KV and mask tokens behind them. The row of the last committed id and the
row of each mask predict one token each. No row depends on a token chosen at another one, so each token is sampled from
the distribution of its row, and neither rules nor trees need further forwards.
Source: PARD, An et al., arXiv:2504.18583.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.model.sequence import DraftKV
from betoken.drafters.model.tokens import DraftToken, Place, add_children, choose_draft_tokens, sample_group
from betoken.engine.sampler import SampleGroup


@dataclass(slots=True)
class ParallelChain:
    """A draft of a sequence, and the rows that give its tokens."""

    sequence: DraftSequence
    rows: range
    path_ids: Sequence[int] = ()
    """Ids between the committed ones and the draft, if it is made ahead."""
    tokens: list[DraftToken] = field(default_factory=list)
    is_complete: bool = False

    @property
    def first_group(self) -> SampleGroup:
        """The row of the first token."""
        return sample_group(self.sequence, self.path_ids)

    def next_group(self) -> SampleGroup:
        """The rows whose tokens can be chosen now: all, or the next one if rules depend on the tokens before."""
        group = sample_group(self.sequence, [*self.path_ids, *(token.token_id for token in self.tokens)])
        has_rules = group.params.has_rules if group.rules is None else not group.rules.is_empty
        if not has_rules:
            group.draft_ids = [0] * (len(self.rows) - len(self.tokens) - 1)
        return group

    def add(self, token: DraftToken) -> None:
        """Append a token, unless one before it ends the answer."""
        if not self.is_complete:
            self.tokens.append(token)
            self.is_complete = len(self.tokens) == len(self.rows) or token.token_id in self.sequence.end_ids


class ParallelDrafting:
    """Makes drafts from the logits of one forward."""

    def __init__(self, mask_token_id: int, source: str) -> None:
        """`source`: name of the drafter."""
        self.mask_token_id = mask_token_id
        self._source = source

    def masks(self, kv: DraftKV) -> list[int]:
        """Return the ids that follow the committed ones; one less than the tokens of the longest path."""
        return [self.mask_token_id] * (kv.num_positions - 1)

    def take(self, drafting: Sequence[tuple[DraftSequence, DraftKV]], logits: Tensor) -> list[ParallelChain]:
        """Choose the drafts of sequences; return the chains among them.

        Args:
            drafting: sequences in row order; each has one row for each token of its longest path.
            logits: [R, V].
        """
        chains: list[ParallelChain] = []
        drafted: list[DraftKV] = []
        trees: list[tuple[Place, int]] = []
        end = 0
        for seq, kv in drafting:
            first, end = end, end + kv.num_positions
            if kv.tree is None:
                chains.append(ParallelChain(seq, range(first, end)))
                drafted.append(kv)
            else:
                trees.append((Place(seq, kv.tree, -1), first))
        choose_chains(chains, logits)
        for chain, kv in zip(chains, drafted, strict=True):  # a fault leaves all sequences without tokens
            for token in chain.tokens:
                kv.add_token(token, self._source, chain.sequence.end_ids)
        _grow(trees, logits)
        return chains


def choose_chains(chains: Sequence[ParallelChain], logits: Tensor) -> None:
    """Choose the tokens of chains, each from its rows of `logits` [R, V]."""
    while growing := [chain for chain in chains if not chain.is_complete]:
        groups = [chain.next_group() for chain in growing]
        rows = [
            row
            for chain, group in zip(growing, groups, strict=True)
            for row in islice(chain.rows, len(chain.tokens), len(chain.tokens) + group.num_rows)
        ]
        chosen = logits if len(rows) == len(logits) else logits[rows]
        tokens = iter(choose_draft_tokens(chosen, groups, [chain.sequence for chain in growing]))
        for chain, group in zip(growing, groups, strict=True):
            for token in islice(tokens, group.num_rows):
                chain.add(token)


def _grow(trees: Sequence[tuple[Place, int]], logits: Tensor) -> None:
    """Grow trees until they are complete. The row of a node's depth gives its children. Each tree comes with its first
    row."""
    places = list(trees)
    while places:
        add_children(
            [place for place, _ in places],
            logits[[first + len(place.tree.path_ids(place.node)) for place, first in places]],
        )
        places = []
        for (seq, tree, _), first in trees:
            nodes = tree.to_expand()
            tree.add_rows(nodes)
            places += [(Place(seq, tree, node), first) for node in nodes]
