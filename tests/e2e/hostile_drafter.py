"""A plug-in that drafts anything: random trees with the true tokens on some path, and every kind of invalid draft."""

import random

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.immediate import ImmediateDrafter

VOCAB_SIZE = 272


class HostileDrafter(ImmediateDrafter):
    """Its state is the class's: the worker makes the instance, the test provides the true tokens."""

    truths: dict[tuple[int, ...], tuple[int, ...]] = {}
    """The target's tokens, by prompt."""
    rng = random.Random(0)
    num_of: dict[str, int] = {}
    """How often each kind of draft was made."""

    @classmethod
    def reset(cls, seed: int, truths: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        cls.rng, cls.truths, cls.num_of = random.Random(seed), truths, {}

    def open(self, sequence: DraftSequence) -> None:
        """Any settings will do."""

    def propose(self, sequence: DraftSequence, num_tokens: int) -> Drafted:
        kinds = ["tree"] * 12 + ["raises", "bad ids", "bad parents", "other base", "too many", "unknown ids", "empty"]
        kind = self.rng.choice(kinds)
        self.num_of[kind] = self.num_of.get(kind, 0) + 1
        ids, parents = self._tree(sequence, 3 * num_tokens if kind == "too many" else num_tokens)
        if kind == "raises":
            raise RuntimeError("no draft today")
        if kind == "other base":
            sequence.ids.append(7)  # not its to change: the block's base is then not the committed length
        if kind == "bad parents":
            parents = [self.rng.randrange(-3, len(ids) + 2) for _ in ids]
        if kind == "bad ids":
            ids[self.rng.randrange(len(ids))] = self.rng.choice([-1, 1 << 40])
        if kind == "unknown ids":
            ids[self.rng.randrange(len(ids))] = VOCAB_SIZE + self.rng.randrange(1000)
        if kind == "empty":
            ids, parents = [], []
        return Drafted(sequence, ids, parents)

    def _tree(self, sequence: DraftSequence, num_nodes: int) -> tuple[list[int], list[int]]:
        """Siblings may be equal; trees come whether or not the target takes them."""
        truth = self.truths.get(tuple(sequence.prompt_ids), ())[len(sequence.ids) - len(sequence.prompt_ids) :]
        ids: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for node in range(num_nodes):
            parent = self.rng.randrange(max(-1, node - 4), node)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
            is_right = depths[-1] < len(truth) and self.rng.random() < 0.7
            ids.append(truth[depths[-1]] if is_right else self.rng.randrange(VOCAB_SIZE))
            parents.append(parent)
        return ids, parents
