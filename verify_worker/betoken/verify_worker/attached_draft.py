"""Converts a sequence for its attached drafter, and its drafts to blocks and decisions."""

from collections.abc import Sequence
from dataclasses import replace

from betoken.common.names import PREDICTION
from betoken.drafters.drafter import DraftSequence
from betoken.drafters.host.hosted import Answer
from betoken.engine.sampler.verification import VerificationMode
from betoken.verify_worker.sequence import AttachedDecision, AttachedRound, Block, VerifySequence


def draft_sequence(seq: VerifySequence, has_own_rules: bool = False) -> DraftSequence:
    """The sequence as drafters see it.

    `has_own_rules`: whether its logits processors are copies, which follow the drafter's commits: needed if drafts may
    take so long that the target commits meanwhile.
    """
    output_ids = list(seq.output_ids)
    return DraftSequence(
        key=seq.key,
        params=replace(seq.params, num_logprobs=None),
        prompt_ids=seq.prompt_ids,
        output_ids=output_ids,
        max_length=seq.max_length,
        settings=dict(seq.opened.drafter_settings) if seq.drafter == seq.opened.drafter else {},
        takes_trees=seq.mode is not VerificationMode.REJECTION,
        wants_probs=seq.mode is VerificationMode.REJECTION and seq.params.temperature > 0.0,
        draft_affects_output=seq.mode is not VerificationMode.COUPLED,
        predicted_ids=seq.opened.predicted_ids,
        tenant=seq.opened.tenant,
        rules=seq.rules.branched(seq.params, output_ids, 0) if has_own_rules else seq.rules,
        has_shared_rules=not has_own_rules,
        target_kv=lambda: (seq.page_ids, seq.kv_length),
        span=seq.span,
    )


def take_draft(seq: VerifySequence, answer: Answer) -> bool:
    """Make a draft the block of the next round; return whether it is one for the committed text."""
    drafted = answer.drafted
    if answer.is_failed:
        seq.attached_round = AttachedRound(is_failed=True)
        return False
    if answer.request.key[0] != seq.committed_length:  # too late
        return False
    seq.attached_round = AttachedRound(tuple(answer.sources), answer.forward_ns, drafted.num_forwards)
    if drafted.draft_ids:
        probs = list(drafted.draft_probs) if answer.hosted.sequence.wants_probs else []
        block = Block(drafted.draft_ids, drafted.parents or (), probs)
        if seq.rules.has_grammar and not probs:
            block.keep(seq.rules.allowed_nodes(block.draft_ids, block.parents or None))
        seq.block = block
    return True


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
