"""Acceptance in Triton: one program a block, one pass over its nodes; see the package for the contract."""

import torch
import triton
import triton.language as tl

_NODES = 128  # looked at together


def accept(
    target_ids: torch.Tensor, draft_ids: torch.Tensor, parents: torch.Tensor | None, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`accept.accept` for validated tensors."""
    num_blocks = offsets.shape[0] - 1
    num_accepted, next_id = (target_ids.new_empty(num_blocks) for _ in range(2))
    path = torch.empty_like(draft_ids)
    if num_blocks > 0:
        _accept[(num_blocks,)](
            target_ids,
            draft_ids,
            draft_ids if parents is None else parents,
            offsets,
            num_accepted,
            path,
            next_id,
            IS_CHAIN=parents is None,
            BLOCK=_NODES,
            num_warps=1,
        )
    return num_accepted, path, next_id


@triton.jit
def _accept(
    target_ids,  # [N + B]
    draft_ids,  # [N]
    parents,  # [N]; not read when IS_CHAIN
    offsets,  # [B + 1]
    num_accepted,  # [B]
    path,  # [N]
    next_id,  # [B]
    IS_CHAIN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0)
    start = tl.load(offsets + block)
    num_nodes = tl.load(offsets + block + 1) - start
    targets = target_ids + start + block
    node = start * 0 - 1  # the last accepted one
    depth = start * 0
    wanted = tl.load(targets)
    first = start * 0
    while first < num_nodes:
        # Children follow their parent: the first match after `node` is the accepted child, if it has any.
        index = first + tl.arange(0, BLOCK)
        is_node = index < num_nodes
        parent = index - 1
        if not IS_CHAIN:
            parent = tl.load(parents + start + index, mask=is_node, other=-2)
        is_match = is_node & (parent == node) & (tl.load(draft_ids + start + index, mask=is_node, other=0) == wanted)
        match = tl.min(tl.where(is_match, index, num_nodes), 0)
        first += BLOCK
        if match < num_nodes:
            tl.store(path + start + depth, match)
            node = match
            depth += 1
            wanted = tl.load(targets + node + 1)
            first = node + 1
    tl.store(num_accepted + block, depth)
    tl.store(next_id + block, wanted)
    for rest in range(depth, num_nodes, BLOCK):
        index = rest + tl.arange(0, BLOCK)
        tl.store(path + start + index, tl.full([BLOCK], -1, tl.int64), mask=index < num_nodes)
