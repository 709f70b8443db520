"""A draft as the router uses it: the leading part of a draft worker's answer that the target could take.

Knows no session, no time-outs and no verification results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from betoken.common.errors import InvalidArgumentError
from betoken.common.names import PREDICTION
from betoken.common.tree import is_chain, leading_chain, longest_path, num_sound
from betoken.rpc.validation import validate_distribution
from betoken.v1.draft_pb2 import DraftedBlock
from betoken.v1.types_pb2 import SparseDistribution

_MAX_SOURCE_CHARS = 64


class Draft(NamedTuple):
    """A chain or tree of guesses for one round; empty = none."""

    ids: Sequence[int] = ()
    sources: Sequence[str] = ()
    """Names of the drafters that proposed the ids: one for all, one per id, or none."""
    queue_ns: int = 0
    forward_ns: int = 0
    parents: Sequence[int] = ()
    """Parent index per id, -1 = the last committed token; empty = a chain."""
    probs: Sequence[SparseDistribution] = ()
    """Distribution of each id; empty = each was certain."""
    num_forwards: int = 0
    """Forwards of the drafter's models since its last answer."""
    num_ahead_ids: int | None = None
    """Leading ids that were drafted ahead; None if the drafter was not to draft ahead."""
    num_ahead_tokens: int = 0
    """Tokens drafted ahead for this draft, for all outcomes."""

    @property
    def num_tokens(self) -> int:
        """Draft tokens of all branches."""
        return len(self.ids)

    @property
    def num_predicted_tokens(self) -> int:
        """Draft tokens that the request expects."""
        sources = list(self.sources)
        return self.num_tokens if sources == [PREDICTION] else sources.count(PREDICTION)

    @property
    def depth(self) -> int:
        """Most ids that can be accepted."""
        return longest_path(self.parents) if self.parents else len(self.ids)

    def along(self, path: Sequence[int]) -> tuple[Sequence[int], Sequence[str]]:
        """Ids, and sources if there are any, of the nodes of an accepted `path`."""
        sources = self.sources
        if len(sources) == 1:
            sources = (sources[0],) * len(self.ids)
        if not self.parents:
            return self.ids[: len(path)], sources[: len(path)]
        return [self.ids[node] for node in path], [sources[node] for node in path] if sources else ()

    def is_exhausted_by(self, path: Sequence[int]) -> bool:
        """Whether nothing was proposed after the accepted `path`."""
        last = path[-1] if path else -1
        return last not in self.parents if self.parents else last == len(self.ids) - 1


NO_DRAFT = Draft()


def usable_draft(block: DraftedBlock, num_tokens: int, vocab_size: int, takes_trees: bool, elapsed_ns: int) -> Draft:
    """The block's first `num_tokens` nodes, up to the first that no target of this vocabulary or kind could take.

    Its times are at most `elapsed_ns`, or sums of them would overflow.
    """
    ids = block.ids[:num_tokens]
    parents: Sequence[int] = ()
    if block.parents:
        parents = block.parents[: len(ids)]
        num_kept = num_sound(parents) if takes_trees else leading_chain(parents)
        del ids[num_kept:]
    if ids and max(ids) >= vocab_size:
        del ids[next(index for index, token_id in enumerate(ids) if token_id >= vocab_size) :]
    if parents:
        parents = parents[: len(ids)]
        if is_chain(parents):
            parents = ()
    sources: Sequence[str] = block.sources[: len(ids)]
    if len(sources) not in (1, len(ids)) or max(map(len, sources), default=0) > _MAX_SOURCE_CHARS:
        sources = ()
    forward_ns = min(block.forward_ns, elapsed_ns)
    queue_ns = min(block.queue_ns, elapsed_ns - forward_ns)
    draft = Draft(ids, sources, queue_ns, forward_ns, parents, num_forwards=block.num_forwards)
    if not block.HasField("num_ahead_ids"):
        return draft
    num_ahead_ids = min(block.num_ahead_ids, block.num_ahead_tokens, len(ids))
    return draft._replace(num_ahead_ids=num_ahead_ids, num_ahead_tokens=block.num_ahead_tokens)


def usable_probs(block: DraftedBlock, ids: Sequence[int], vocab_size: int) -> list[SparseDistribution]:
    """One distribution per id. Without a distribution from the drafter, the id counts as certain. That is as exact for
    any id chosen without the verify worker's noise."""
    probs = []
    for index, token_id in enumerate(ids):
        try:
            distribution = block.draft_probs[index]
            validate_distribution("draft_probs", distribution, token_id, vocab_size)
        except (IndexError, InvalidArgumentError):
            distribution = SparseDistribution(token_ids=[token_id], probs=[1.0])
        probs.append(distribution)
    return probs
