"""Which draft tokens are the target's own: an equality test along chains and trees.

It knows ids only: no logits, no probabilities, no sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from foretoken.kernels import dispatch
from foretoken.kernels.accept import reference
from foretoken.kernels.accept.reference import accept_block

__all__ = ["accept", "accept_block"]

IMPLEMENTATIONS: dict[dispatch.PathName, Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]] = {
    "reference": reference.accept
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
        ValueError: a shape, dtype or device other than above, or bad offsets or parents.
    """
    for name, tensor in (("target_ids", target_ids), ("draft_ids", draft_ids), ("offsets", offsets)):
        if tensor.dim() != 1 or tensor.dtype != torch.int64 or tensor.device != target_ids.device:
            raise ValueError(
                f"{name} must be 1-d int64 on {target_ids.device}, "
                f"got {list(tensor.shape)} {tensor.dtype} on {tensor.device}"
            )
    num_nodes, num_blocks = draft_ids.shape[0], offsets.shape[0] - 1
    if num_blocks < 0 or target_ids.shape[0] != num_nodes + num_blocks:
        raise ValueError(
            f"target_ids must have one row per node and block, {num_nodes + num_blocks}, got {target_ids.shape[0]}"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != num_nodes or bool((offsets.diff() < 0).any()):
        raise ValueError(f"offsets must go from 0 to {num_nodes} without decreasing, got {offsets.tolist()}")
    if parents is not None:
        if parents.shape != draft_ids.shape or parents.dtype != torch.int64 or parents.device != target_ids.device:
            raise ValueError(f"parents must be [{num_nodes}] int64, got {list(parents.shape)} {parents.dtype}")
        index = torch.arange(num_nodes, device=parents.device)
        index -= torch.repeat_interleave(offsets[:-1], offsets.diff())
        if bool(((parents < -1) | (parents >= index)).any()):
            raise ValueError("parents must be -1 or a smaller index of the same block")
    _, implementation = dispatch.select(target_ids.device, IMPLEMENTATIONS)
    return implementation(target_ids, draft_ids, parents, offsets)
