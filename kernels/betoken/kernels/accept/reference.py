"""Torch reference of acceptance; see the package for the contract. Plain Python over ids: the algorithm on one page."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def accept_block(
    target_ids: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int] | None = None
) -> tuple[list[int], int]:
    """Walks one draft block along the target's own tokens.

    Args:
        target_ids: K + 1 ids: the target's token after the last committed token, then after each draft node.
        draft_ids: K ids.
        parents: K indices into draft_ids, -1 for the last committed token, each below its own index; None is a chain.
    Returns:
        The accepted nodes, root first, and the target's token after the last of them.
    """
    if parents is None:
        num_accepted = 0
        for draft_id, target_id in zip(draft_ids, target_ids, strict=False):
            if draft_id != target_id:
                break
            num_accepted += 1
        return list(range(num_accepted)), target_ids[num_accepted]
    path: list[int] = []
    node = -1
    for i, parent in enumerate(parents):  # children follow their parent, so one pass is a walk down
        if parent == node and draft_ids[i] == target_ids[node + 1]:
            node = i
            path.append(i)
    return path, target_ids[node + 1]


def accept(
    target_ids: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor | None, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The rules of `betoken.kernels.accept.accept`, any device."""
    bounds = offsets.tolist()
    targets, drafts = target_ids.tolist(), draft_ids.tolist()
    all_parents = None if parents is None else parents.tolist()
    paths = [-1] * len(drafts)
    num_accepted: list[int] = []
    next_ids: list[int] = []
    for block, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        path, next_id = accept_block(
            targets[start + block : end + block + 1],
            drafts[start:end],
            None if all_parents is None else all_parents[start:end],
        )
        paths[start : start + len(path)] = path
        num_accepted.append(len(path))
        next_ids.append(next_id)
    device = target_ids.device
    return (
        torch.tensor(num_accepted, dtype=torch.int64, device=device),
        torch.tensor(paths, dtype=torch.int64, device=device),
        torch.tensor(next_ids, dtype=torch.int64, device=device),
    )
