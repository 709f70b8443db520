"""From a draft model's logits to draft tokens, for chains and trees of many sequences in one call.

Knows rows of logits and what each follows; does not know forwards or KV.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.model.tree import ERROR_SCALE, ModelTree
from betoken.engine.sampler import SampleGroup, choose_tokens, perturbed_top
from betoken.engine.sampler.draft_probs import sample_drafts
from betoken.engine.sparse_probs import SparseProbs


def sample_group(seq: DraftSequence, draft_ids: Sequence[int], following_ids: Sequence[int] = ()) -> SampleGroup:
    """The rows after `draft_ids`, and after each of the `following_ids`."""
    prompt_ids, output_ids, rules = seq.history(draft_ids)
    return SampleGroup(seq.params, prompt_ids, output_ids, following_ids, rules)


class DraftToken(NamedTuple):
    """A draft token of a chain."""

    token_id: int
    probs: SparseProbs | None
    """Distribution that it was sampled from, if its sequence needs it."""


class Place(NamedTuple):
    """A node of a tree whose children are wanted."""

    sequence: DraftSequence
    tree: ModelTree
    node: int
    """-1 = the last committed token."""


def choose_draft_tokens(
    logits: Tensor, groups: Sequence[SampleGroup], sequences: Sequence[DraftSequence]
) -> list[DraftToken]:
    """Return the model's token of every row.

    Args:
        logits: [R, V].
        groups: in row order; their rows add up to R.
        sequences: of each group. Tokens with probabilities are sampled with the drafter's own noise.
    """
    tokens = [DraftToken(token_id, None) for token_id in choose_tokens(logits, groups).token_ids]
    first_rows = list(accumulate((group.num_rows for group in groups), initial=0))
    private = [index for index, sequence in enumerate(sequences) if sequence.wants_probs]
    if private:
        rows = [row for index in private for row in range(first_rows[index], first_rows[index + 1])]
        sampled = sample_drafts(logits[rows], [groups[index] for index in private])
        for row, token in zip(rows, sampled, strict=True):
            tokens[row] = DraftToken(*token)
    return tokens


def add_children(places: Sequence[Place], logits: Tensor) -> None:
    """Add the model's likeliest tokens below nodes; rules apply along each node's path.

    `logits`: [R, V], the row of each place.
    """
    groups = [sample_group(seq, tree.path_ids(node)) for seq, tree, node in places]
    ids, log_shares = perturbed_top(logits, groups, max(tree.max_branches for _, tree, _ in places), ERROR_SCALE)
    for (_, tree, node), *children in zip(places, ids.tolist(), log_shares.tolist(), strict=True):
        tree.add_children(node, *children)
