"""Acceptance in plain Python over ids: the algorithm on one page."""

from __future__ import annotations

from collections.abc import Sequence


def accept_block(
    target_ids: Sequence[int], draft_ids: Sequence[int], parents: Sequence[int] | None = None
) -> tuple[list[int], int]:
    """Walks one draft block along the target's own tokens; of equal siblings the first is taken.

    Example: the chain [5, 6, 7] with target_ids [5, 6, 9, 3] gives [0, 1] and 9 (recovered); with [5, 6, 7, 3] it gives
    [0, 1, 2] and 3 (bonus).

    Args:
        target_ids: K + 1 ids: the target's token after the last committed token, then after each draft node.
        draft_ids: K ids.
        parents: K indices into draft_ids, -1 for the last committed token, each below its own index; None stands for a
            chain.
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
