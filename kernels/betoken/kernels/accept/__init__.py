"""Which draft tokens are the target's own: an equality test along chains and trees.

It knows ids only: no logits, no probabilities, no sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from betoken.kernels import checks, dispatch
from betoken.kernels.accept import reference
from betoken.kernels.accept.reference import accept_block

__all__ = ["accept", "accept_block"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "reference": reference.accept,
    "triton": dispatch.triton("betoken.kernels.accept.kernel", "accept"),
}


def accept(
    target_ids: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor | None, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepts the longest path of each draft block that equals the target's own tokens.

    Block b owns the draft nodes [offsets[b], offsets[b + 1]) and the target rows
    [offsets[b] + b, offsets[b + 1] + b + 1): its first row is the target's token after the last committed token, the
    row after that belongs to its first node, and so on.

    Example: one chain with draft_ids [5, 6, 7] and target_ids [5, 6, 9, 3] gives num_accepted 2, path [0, 1, -1] and
    next_id 9 (recovered); with target_ids [5, 6, 7, 3] it gives 3, [0, 1, 2] and 3 (bonus).

    Args:
        target_ids: [N + B] int64, the target's token at every row.
        draft_ids: [N] int64.
        parents: [N] int64 index of each node's parent within its block, -1 = the last committed token, each below the
            node's own index; of equal siblings the first is taken. None: every block is a chain.
        offsets: [B + 1] int64, from 0 to N, not decreasing.
    Returns:
        num_accepted [B] int64; path [N] int64: block b's accepted nodes, by index within the block and root first,
        from offsets[b] on, then -1; next_id [B] int64: the target's token after the accepted path.
    Raises:
        ValueError: a shape, dtype or device other than above; on CPU also bad offsets or parents.
    """
    num_nodes, num_blocks = draft_ids.numel(), offsets.numel() - 1
    checks.check_column("draft_ids", draft_ids, num_nodes, torch.int64, target_ids.device)
    checks.check_column("offsets", offsets, num_blocks + 1, torch.int64, target_ids.device)
    checks.check_column("target_ids", target_ids, num_nodes + num_blocks, torch.int64, target_ids.device)
    if num_blocks < 0:
        raise ValueError("offsets must not be empty")
    checks.check_offsets("offsets", offsets, num_nodes)
    if parents is not None:
        checks.check_column("parents", parents, num_nodes, torch.int64, target_ids.device)
        _check_parents(parents, offsets)
    _, implementation = dispatch.select(target_ids.device, IMPLEMENTATIONS)
    return implementation(target_ids, draft_ids, parents, offsets)


def _check_parents(parents: torch.Tensor, offsets: torch.Tensor) -> None:
    if parents.device.type != "cpu":  # reading values of a device would be a synchronisation
        return
    index = torch.arange(parents.shape[0]) - torch.repeat_interleave(offsets[:-1], offsets.diff())
    if bool(((parents < -1) | (parents >= index)).any()):
        raise ValueError("parents must be -1 or a smaller index of the same block")
