"""Statistics of an answer, as a small table or as one JSON object.

Knows answers; knows no stream and no command.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from betoken.client import Completion, Logprobs, Token, VerificationMode

_MODE_NOTES = {
    VerificationMode.REJECTION: "the target's distribution, but the tokens depend on the draft",
    VerificationMode.TYPICAL: "lossy, not the target's distribution",
}
_BARS = " ▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class TimedCompletion:
    """A completion and the seconds from the call to its last message, as the client measured them."""

    completion: Completion
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, prefill and transport included."""
        return tokens_per_s(self.completion, self.seconds)


def table(completion: Completion, elapsed_s: float) -> Table:
    """Speed and speculation; `elapsed_s` as the caller measured it, from asking to the last token."""
    stats = completion.speculation
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")  # a seed cut short gives other tokens
    ended = f"{len(completion.tokens)} in {elapsed_s:.2f} s, ended by {_ending(completion)}"
    grid.add_row("tokens", Text(ended))  # a stop string may look like markup: [/INST]
    grid.add_row("tokens/s", f"{tokens_per_s(completion, elapsed_s):.1f}")
    if completion.mode in _MODE_NOTES:
        grid.add_row("verification", f"{completion.mode}: {_MODE_NOTES[completion.mode]}")
    grid.add_row("first token", f"{completion.time_to_first_token_s * 1e3:.0f} ms")
    if stats.num_drafts:
        drafted = stats.num_draft_tokens / stats.num_drafts
        grid.add_row("accepted per round", f"{stats.accepted_per_round:.2f} of {drafted:.1f} drafted")
        grid.add_row("acceptance rate", f"{stats.acceptance_rate:.0%}")
        grid.add_row("  by position", _by_position(stats.acceptance_per_position))
    if num_predicted := stats.num_accepted_prediction_tokens + stats.num_rejected_prediction_tokens:
        grid.add_row("prediction", f"{stats.num_accepted_prediction_tokens} accepted of {num_predicted} drafted")
    if stats.num_draft_forwards:
        grid.add_row("draft forwards per round", f"{stats.draft_forwards_per_round:.2f}")
    if num_outcomes := stats.num_ahead_hits + stats.num_ahead_misses:
        used = f"{stats.num_used_ahead_tokens} of {stats.num_ahead_tokens} tokens used"
        grid.add_row("drafted ahead", f"{stats.num_ahead_hits} of {num_outcomes} drafts, {used}")
    if stats.num_verify_forwards:
        grid.add_row("block efficiency", f"{stats.block_efficiency:.2f} tokens per target forward")
    if stats.num_failed_drafts or stats.num_failovers or completion.num_resumes:
        reasons = ", ".join(f"{reason} {number}" for reason, number in stats.num_failed_drafts_by_reason.items())
        faults = (
            f"{stats.num_failed_drafts} failed drafts{reasons and f' ({reasons})'}, {stats.num_failovers} failovers"
        )
        grid.add_row("faults", f"{faults}, {completion.num_resumes} resumed streams")
    if stats.is_synthetic:
        grid.add_row("synthetic", "a worker simulates its model: tokens and times are made up")
    if stats.policy is not None:
        grid.add_row("speculation", stats.policy.reason)
    grid.add_row("seed", str(completion.seed))
    return grid


def as_json(completion: Completion, elapsed_s: float) -> dict[str, Any]:
    """Everything about the answer, of JSON types only."""
    stats = completion.speculation
    fields = asdict(completion)
    fields["tokens"] = [_token_json(token) for token in completion.tokens]
    fields["prompt_logprobs"] = [one and _logprobs_json(one) for one in completion.prompt_logprobs]
    fields["output_ids"] = list(completion.output_ids)
    fields["speculation"] |= {
        "acceptance_rate": stats.acceptance_rate,
        "accepted_per_round": stats.accepted_per_round,
        "acceptance_per_position": stats.acceptance_per_position,
        "draft_forwards_per_round": stats.draft_forwards_per_round,
        "block_efficiency": stats.block_efficiency,
    }
    return fields | {"elapsed_s": elapsed_s, "tokens_per_s": tokens_per_s(completion, elapsed_s)}


def tokens_per_s(completion: Completion, elapsed_s: float) -> float:
    """Tokens received over the time from asking to the last one."""
    return len(completion.tokens) / elapsed_s if elapsed_s > 0 else 0.0


def _token_json(token: Token) -> dict[str, Any]:
    fields: dict[str, Any] = {"id": token.id, "text": token.text, "origin": token.origin, "source": token.source}
    if token.logprobs is not None:
        fields |= _logprobs_json(token.logprobs)
    return fields


def _logprobs_json(logprobs: Logprobs) -> dict[str, Any]:
    top = [{"id": id_, "logprob": logprob} for id_, logprob in logprobs.top]
    return {"logprob": logprobs.logprob, "top_logprobs": top}


def _ending(completion: Completion) -> str:
    if completion.stop:
        return f"the stop string {completion.stop!r}"
    return {"stop": "a stop token", "length": "its length"}.get(completion.finish_reason, "an unknown cause")


def _by_position(rates: tuple[float, ...]) -> str:
    """A bar and a number per draft position."""
    return "  ".join(f"{_BARS[round(rate * (len(_BARS) - 1))]} {rate:.0%}" for rate in rates)
