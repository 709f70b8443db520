"""Verification on one page: run the target over [last committed id, draft...], accept what it would have chosen itself.

    token(pos) = argmax_v logits'(v) + T * gumbel(seed, pos, v)

The rule does not mention the draft, so a draft token is accepted exactly when it is the target's own token. A tree is
walked down while the target's token is among the children. Sequences of the other verification modes share the forward.
Knows no scheduling and no links.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from betoken.drafters.host.feed import CommittedRows
from betoken.engine.batch import Segment
from betoken.engine.runner import BegunForward, ModelRunner
from betoken.engine.sampler import SampleGroup
from betoken.engine.sampler.verification import BlockGroup, Verified, verify_blocks
from betoken.engine.tree import KeptPath
from betoken.verify_worker.attached_draft import take_attached
from betoken.verify_worker.prompt_logprobs import PromptPart, block_logits, prompt_logprobs_of
from betoken.verify_worker.scheduler import Work
from betoken.verify_worker.sequence import Decision


class Stepped(NamedTuple):
    """The results of one forward."""

    decisions: list[Decision]
    committed: CommittedRows
    """Rows that hold features of what was committed."""
    prompt_parts: list[PromptPart]


class BegunStep(NamedTuple):
    """A forward under way over planned work."""

    planned: Sequence[Work]
    segments: Sequence[Segment]
    forward: BegunForward | None
    """None: it runs when the step finishes."""
    started_ns: int


def begin_step(runner: ModelRunner, planned: Sequence[Work]) -> BegunStep:
    """Begin one forward over the planned work.

    A block of K draft tokens is K + 1 rows. Row 0 sees the committed ids; row i + 1 also sees draft id i and its path.
    The token after the accepted path so comes from the same forward. Prefill rows yield logits only if the prompt's
    logprobs are requested.
    """
    started_ns = time.perf_counter_ns()
    segments = [_segment(work) for work in planned]
    begun = runner.begin(segments) if runner.max_in_flight > 1 else None
    for work in planned:
        work.sequence.is_in_flight = True
    return BegunStep(planned, segments, begun, started_ns)


def finish_step(runner: ModelRunner, step: BegunStep) -> Stepped:
    """Finish the forward begun first and commit what it decides. A sequence that was closed meanwhile, or whose logits
    choose no token, gets no decision."""
    planned, started_ns = step.planned, step.started_ns
    for work in planned:
        work.sequence.is_in_flight = False
    output = runner.forward(step.segments) if step.forward is None else runner.finish(step.forward)
    verified = [work for work in planned if work.takes_block]
    prompt_parts = prompt_logprobs_of(output.logits, planned)
    logits = block_logits(output.logits, planned)
    judged = iter(verify_blocks(logits, [_block_group(work) for work in verified]) if verified else ())
    forward_ns = time.perf_counter_ns() - started_ns

    decisions: list[Decision] = []
    kept_paths: list[KeptPath] = []
    committed = CommittedRows(output.features)
    first_row = 0
    for work in planned:
        row, first_row = first_row, first_row + work.num_rows
        first_position = work.sequence.kv_length
        if work.sequence.is_closed:
            if work.takes_block:
                next(judged)
            continue
        if not work.takes_block:
            work.sequence.kv_length += work.num_prefill
            committed.add(work.sequence.key, first_position, row, work.num_prefill, ())
            continue
        outcome = next(judged)
        if not outcome.emitted_ids:
            continue
        decision = _decide(work, outcome, started_ns, forward_ns)
        decisions.append(decision)
        committed.add(
            work.sequence.key, first_position, row, work.num_prefill, [0, *(1 + node for node in outcome.path)]
        )
        if work.parents is not None:
            kept_paths.append(KeptPath(work.sequence.page_ids, decision.base_length, outcome.path))
    if kept_paths:
        runner.compact(kept_paths)
    for work in planned:
        if work.sequence.is_closed:
            continue
        runner.page_table.publish(work.sequence.page_ids, work.sequence.ids, work.sequence.kv_length)
    return Stepped(decisions, committed, prompt_parts)


def _segment(work: Work) -> Segment:
    seq = work.sequence
    ids = seq.ids[seq.kv_length : seq.kv_length + work.num_prefill]
    if work.takes_block:
        ids = [*ids, seq.ids[-1], *work.draft_ids]
    num_committed = seq.kv_length + len(ids) - len(work.draft_ids)
    return Segment(seq.page_ids, seq.kv_length, ids, work.num_logits, work.parents, num_committed=num_committed)


def _block_group(work: Work) -> BlockGroup:
    seq = work.sequence
    return BlockGroup(
        SampleGroup(
            params=seq.params,
            prompt_ids=seq.prompt_ids,
            output_ids=seq.output_ids,
            draft_ids=work.draft_ids,
            rules=seq.rules,
            parents=work.parents,
        ),
        seq.mode,
        seq.block.draft_probs if seq.block is not None else (),
        seq.opened.bounds,
    )


def _decide(work: Work, verified: Verified, started_ns: int, forward_ns: int) -> Decision:
    """Accept, commit, and report; the sequence's committed length grows by num_accepted + 1."""
    seq = work.sequence
    num_draft_tokens = seq.block.num_sent if seq.block is not None else 0
    base_length = seq.committed_length
    seq.num_draft_tokens += num_draft_tokens
    num_kept = seq.commit(verified.emitted_ids)
    seq.num_accepted += min(verified.num_accepted, num_kept)
    num_cached_tokens, seq.num_cached_tokens = seq.num_cached_tokens, 0
    return Decision(
        key=seq.key,
        base_length=base_length,
        num_draft_tokens=num_draft_tokens,
        num_accepted=verified.num_accepted,
        path=seq.block.as_sent(verified.path) if seq.block is not None and work.parents is not None else None,
        next_id=verified.emitted_ids[-1],
        logprobs=verified.logprobs,
        queue_ns=max(0, started_ns - max(seq.asked_ns, seq.queued_ns)),
        forward_ns=forward_ns,
        num_cached_tokens=num_cached_tokens,
        num_kept=num_kept,
        attached=take_attached(seq, verified.path, verified.emitted_ids[:-1]),
    )
