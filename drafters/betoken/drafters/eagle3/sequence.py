"""A draft under way. Knows no layer and no other sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from betoken.drafters.eagle3.tree import DynamicTree
from betoken.drafters.side.sequence import SideDraft
from betoken.engine.batch import Segment
from betoken.engine.sampler import SampleGroup
from betoken.engine.sparse_probs import SparseProbs


@dataclass(slots=True, eq=False)
class EagleDraft(SideDraft):
    """A draft under way."""

    tree: DynamicTree
    probs: list[SparseProbs] = field(default_factory=list)
    """Distribution of each token, if needed; only for chains."""
    num_asked: int = 1
    """Nodes that the last pass was asked about."""
    num_passes: int = 0
    reach: float = 1.0
    """How likely the target's text goes through what the last pass was asked about."""

    @property
    def is_priced(self) -> bool:
        """Whether it has as many nodes and passes as pay."""
        return self.owner.draft.terms is not None

    @property
    def length(self) -> int:
        """Slots that its next pass writes up to."""
        return self.owner.context.num_known + len(self.tree.row_parents)

    def group(self, node: int) -> SampleGroup:
        """The row that says what follows a node."""
        seq = self.owner.draft
        return SampleGroup(seq.params, seq.prompt_ids, seq.output_ids + self.tree.path_ids(node), (), seq.rules)

    def segment(self) -> Segment:
        """The rows of its next level."""
        tree, ids = self.tree, self.tree.level_ids
        parents = None if tree.is_chain else tree.row_parents
        return Segment(self.owner.context.page_ids, self.length - len(ids), ids, num_logits=len(ids), parents=parents)
