"""A verdict's report on the worker's own draft: the accepted ids and their sources. Knows no drafters."""

from collections.abc import Sequence

from betoken.common.names import PREDICTION
from betoken.verify_worker.sequence import AttachedDecision, Block, VerifySequence


def take_attached(seq: VerifySequence, path: Sequence[int], accepted_ids: list[int]) -> AttachedDecision | None:
    """The fate of the round's own draft, which ends with it; None where its drafter was not asked.

    `path`: the accepted nodes, root first.
    """
    own, seq.attached_round = seq.attached_round, None
    if own is None:
        return None
    sources = own.sources
    if len(sources) > 1 and seq.block is not None:
        sources = [sources[node] for node in seq.block.as_sent(path)]
    return AttachedDecision(
        accepted_ids=accepted_ids,
        sources=sources if path else (),
        depth=seq.block.depth if seq.block is not None else 0,
        is_exhausted=seq.block is None or _is_exhausted(seq.block, path),
        forward_ns=own.forward_ns,
        num_forwards=own.num_forwards,
        is_failed=own.is_failed,
        num_predicted_tokens=_num_predicted(own.sources, seq.block),
    )


def _num_predicted(sources: Sequence[str], block: Block | None) -> int:
    if block is None:
        return 0
    return block.num_sent if sources == (PREDICTION,) else list(sources).count(PREDICTION)


def _is_exhausted(block: Block, path: Sequence[int]) -> bool:
    if block.nodes is not None:  # what a grammar took away was proposed
        return False
    last = path[-1] if path else -1
    return last not in block.parents if block.parents else last == len(block.draft_ids) - 1
