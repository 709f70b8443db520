"""How many tokens a target's forward would yield with a drafter, counted on answers that are known.

The committed text is the target's own whatever is drafted, so each round's outcome follows from one forward over the
whole answer. It knows accepted lengths and ranks, not who drafted.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

Path = tuple[int, ...]
"""Ranks of a node's tokens among each head's guesses, from the root on; 0 is a head's first guess."""


@dataclass(slots=True)
class Rounds:
    """Rounds of drafting and verifying, and the tokens they gave."""

    num_rounds: int = 0
    num_tokens: int = 0
    depths: Counter[int] = field(default_factory=Counter)
    """Rounds by how many drafted tokens were accepted."""

    @property
    def block_efficiency(self) -> float:
        """Tokens a forward; the prompt's is not counted."""
        return self.num_tokens / max(1, self.num_rounds)

    @property
    def by_position(self) -> list[float]:
        """Share of all rounds whose first, second, ... drafted token was accepted; their sum is what drafts gave."""
        deepest = max(self.depths, default=0)
        counts = [sum(num for depth, num in self.depths.items() if depth > place) for place in range(deepest)]
        return [count / max(1, self.num_rounds) for count in counts]

    def add_round(self, accepted: int, room: int) -> int:
        """Count one round and return its tokens.

        Args:
            accepted: drafted tokens that are the text's.
            room: ids after the last committed one, the last of which the target gives in any case; at least 1.
        """
        depth = min(accepted, room - 1)
        self.num_rounds += 1
        self.num_tokens += depth + 1
        self.depths[depth] += 1
        return depth + 1

    def add(self, accepted: Sequence[int], prompt_length: int, length: int) -> None:
        """Count one answer.

        Args:
            accepted: at index c how many drafted tokens would be accepted where c is the index of the last committed
                token; 0 beyond its end.
            prompt_length: ids before the answer, whose first token the prompt's own forward gives.
            length: ids in all.
        """
        last = prompt_length
        while last < length - 1:
            last += self.add_round(accepted[last] if last < len(accepted) else 0, length - 1 - last)


def ranks_of(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rank of each id [N] among logits [N, V]: how many are above it; of equals the lowest id comes first."""
    own = logits.gather(1, ids[:, None])
    before = torch.arange(logits.shape[1], device=logits.device) < ids[:, None]
    return ((logits > own) | ((logits == own) & before)).sum(1)


def best_first(head_shares: Sequence[Sequence[float]], num_nodes: int) -> list[Path]:
    """The `num_nodes` likeliest paths, each after its parent.

    Args:
        head_shares: how likely each head's first, second, ... guess is, not increasing. A path's likelihood is the
            product of its nodes' probabilities, as if heads were independent.
    """
    chosen: list[Path] = []
    frontier: list[tuple[float, Path]] = [(-head_shares[0][0], (0,))]
    while frontier and len(chosen) < num_nodes:
        score, path = heapq.heappop(frontier)
        chosen.append(path)
        shares = head_shares[len(path) - 1]
        if path[-1] + 1 < len(shares) and shares[path[-1]] > 0:
            heapq.heappush(frontier, (score / shares[path[-1]] * shares[path[-1] + 1], (*path[:-1], path[-1] + 1)))
        if len(path) < len(head_shares):
            heapq.heappush(frontier, (score * head_shares[len(path)][0], (*path, 0)))
    return chosen


def accepted_of(ranks: Sequence[int], paths: Sequence[Path]) -> int:
    """How deep a row of ranks, one a head, goes into the tree of `paths`."""
    nodes = set(paths)
    depth = 0
    while depth < len(ranks) and tuple(ranks[: depth + 1]) in nodes:
        depth += 1
    return depth
