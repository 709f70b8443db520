"""The limits of link entries, checked by their receivers.

Knows no sequence's state: bases and order are the worker's. A refusal concerns one sequence: the worker answers it with
a link error, other sequences go on.
"""

import math
from collections.abc import Sequence, Sized
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.common.tree import leading_chain, num_sound
from betoken.rpc.validation.checks import check_count, check_enum, check_ids, check_range, check_text
from betoken.rpc.validation.constraint import validate_constraint
from betoken.rpc.validation.request import (
    MAX_DRAFTER_NAME_BYTES,
    check_drafter,
    check_num_received,
    check_typical,
)
from betoken.rpc.validation.sampling import validate_sampling
from betoken.v1.draft_pb2 import Commit, DraftRequest
from betoken.v1.types_pb2 import VERIFICATION_MODE_TYPICAL, OpenSequence, SparseDistribution, VerificationMode
from betoken.v1.verify_pb2 import DraftBlock

MAX_FRAME_ENTRIES = 1 << 16  # peers close frames at 1 MiB, and what they send most of takes 16 bytes or more
CONTEXT_FIELDS = frozenset({"open.prompt_ids", "commit.ids"})
"""Field that a draft worker reports if a sequence exceeds its context."""
MAX_PLAIN_STEPS = 1024
MAX_DISTRIBUTION_IDS = 64
MAX_OUTCOMES = 16
"""Outcomes of a verification that a drafter drafts ahead for."""
MAX_TRACEPARENT_BYTES = 256
MAX_TENANT_HASH_BYTES = 64
MAX_EOS_TOKEN_IDS = 64
MAX_ADDED_EOS_TOKEN_IDS = 16
"""EOS ids that a router adds to the model's: the tokenizer's, and the fill-in-the-middle tokens of a gap."""
_SUM_TOLERANCE = 1e-3  # float32 probabilities, each rounded

_MODES = frozenset(VerificationMode.values())


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """The limits of one block on a verify worker."""

    vocab_size: int
    max_draft_tokens: int
    supports_trees: bool = False


def validate_frame(*kinds: Sized) -> None:
    """Check the number of entries of each kind in a frame, since its receiver does nothing else meanwhile.

    Unlike the others this concerns the whole link, which ends.

    Raises:
        InvalidArgumentError: there are more than a peer would ever gather in one.
    """
    for entries in kinds:
        if len(entries) > MAX_FRAME_ENTRIES:
            limit = f"must be at most {MAX_FRAME_ENTRIES} of a kind"
            raise InvalidArgumentError("frame", f"{len(entries)} entries", limit)


def validate_open(entry: OpenSequence, *, vocab_size: int, max_context: int) -> None:
    """Check an `OpenSequence`; absent sampling fields mean the neutral value, only the seed must be set unless greedy.

    Raises:
        InvalidArgumentError: the first field outside its limits.
    """
    _check_sequence("open", entry.sequence_id)
    check_count("open.prompt_ids", len(entry.prompt_ids), 1, max_context - 1, "tokens")
    check_ids("open.prompt_ids", entry.prompt_ids, vocab_size)
    check_ids("open.committed_ids", entry.committed_ids, vocab_size)
    check_count("open.predicted_ids", len(entry.predicted_ids), 0, max_context - 1, "tokens")
    check_ids("open.predicted_ids", entry.predicted_ids, vocab_size)
    length = len(entry.prompt_ids) + len(entry.committed_ids)
    if not length < entry.max_length <= max_context:
        limit = f"must be {length + 1} (more than prompt and committed ids) to {max_context}"
        raise InvalidArgumentError("open.max_length", entry.max_length, limit)
    validate_sampling(
        entry.sampling,
        vocab_size=vocab_size,
        max_context=max_context,
        prompt_length=len(entry.prompt_ids),
        prefix="open.sampling",
    )
    check_num_received(
        "open.num_prompt_logprobs_sent", entry.num_prompt_logprobs_sent, entry.sampling, len(entry.prompt_ids)
    )
    if not entry.sampling.HasField("max_new_tokens"):  # then it is what max_length leaves
        room = entry.max_length - len(entry.prompt_ids)
        check_range("open.sampling.min_new_tokens", entry.sampling.min_new_tokens, 0, room)
    is_greedy = entry.sampling.HasField("temperature") and entry.sampling.temperature == 0
    if not is_greedy and not entry.sampling.HasField("seed"):
        raise InvalidArgumentError("open.sampling.seed", "absent", "must be set unless temperature is 0")
    check_enum("open.mode", entry.mode, _MODES)
    check_typical("open", entry, is_typical=entry.mode == VERIFICATION_MODE_TYPICAL)
    check_count("open.eos_token_ids", len(entry.eos_token_ids), 0, MAX_EOS_TOKEN_IDS + MAX_ADDED_EOS_TOKEN_IDS)
    check_ids("open.eos_token_ids", entry.eos_token_ids, vocab_size)
    check_text("open.traceparent", entry.traceparent, MAX_TRACEPARENT_BYTES)
    check_drafter("open.drafter", entry.drafter)
    check_count("open.tenant_hash", len(entry.tenant_hash), 0, MAX_TENANT_HASH_BYTES, "bytes")
    if entry.HasField("constraint"):
        _check_constraint(entry)


def validate_block(block: DraftBlock, limits: BlockLimits) -> None:
    """Check a `DraftBlock`; what the sequence's verification mode allows is its worker's to know.

    Raises:
        InvalidArgumentError: the first field outside its limits.
    """
    num_drafts = len(block.draft_ids)
    _check_sequence("block", block.sequence_id)
    if block.base_length < 1:
        raise InvalidArgumentError("block.base_length", block.base_length, "must be at least 1")
    if num_drafts:
        check_count("block.draft_ids", num_drafts, 0, limits.max_draft_tokens)
        check_ids("block.draft_ids", block.draft_ids, limits.vocab_size)
    if block.num_plain_steps > MAX_PLAIN_STEPS:
        raise InvalidArgumentError("block.num_plain_steps", block.num_plain_steps, f"must be 0 to {MAX_PLAIN_STEPS}")
    if block.num_draft_tokens:
        limit = 0 if num_drafts else limits.max_draft_tokens
        check_range("block.num_draft_tokens", block.num_draft_tokens, 0, limit)
    check_text("block.drafter", block.drafter, MAX_DRAFTER_NAME_BYTES if block.num_draft_tokens else 0)
    if block.parents:
        _check_parents(block.parents, num_drafts, limits.supports_trees)
    if block.draft_probs:
        _check_per_node("block.draft_probs", len(block.draft_probs), num_drafts)
        for index, (distribution, draft_id) in enumerate(zip(block.draft_probs, block.draft_ids, strict=True)):
            validate_distribution(f"block.draft_probs[{index}]", distribution, draft_id, limits.vocab_size)


def validate_distribution(field: str, distribution: SparseDistribution, draft_id: int, vocab_size: int) -> None:
    """Check what `draft_id` was sampled from.

    Raises:
        InvalidArgumentError: the first part of `field` outside its limits.
    """
    ids, probs = distribution.token_ids, distribution.probs
    check_count(f"{field}.token_ids", len(ids), 1, MAX_DISTRIBUTION_IDS)
    if len(probs) != len(ids):
        raise InvalidArgumentError(f"{field}.probs", f"{len(probs)} entries", f"must be one per token id, {len(ids)}")
    check_ids(f"{field}.token_ids", ids, vocab_size)
    if len(set(ids)) != len(ids):
        raise InvalidArgumentError(f"{field}.token_ids", "a repeated id", "must be unique")
    for index, prob in enumerate(probs):
        if not (math.isfinite(prob) and prob >= 0):
            raise InvalidArgumentError(f"{field}.probs[{index}]", prob, "must be finite and at least 0")
    if abs(math.fsum(probs) - 1) > _SUM_TOLERANCE:
        raise InvalidArgumentError(f"{field}.probs", f"a sum of {math.fsum(probs):g}", "must sum to 1")
    if not any(token_id == draft_id and prob > 0 for token_id, prob in zip(ids, probs, strict=True)):
        raise InvalidArgumentError(f"{field}.token_ids", draft_id, "the draft token must have a probability above 0")


def validate_commit(commit: Commit, *, vocab_size: int, max_context: int) -> None:
    """Check a `Commit`.

    Raises:
        InvalidArgumentError: the first field outside its limits.
    """
    _check_sequence("commit", commit.sequence_id)
    check_count("commit.ids", len(commit.ids), 1, max_context, "tokens")
    check_range("commit.base_length", commit.base_length, 1, max_context - len(commit.ids))
    check_ids("commit.ids", commit.ids, vocab_size)


def validate_draft_request(request: DraftRequest, *, max_draft_tokens: int, vocab_size: int) -> None:
    """Check a `DraftRequest`.

    Raises:
        InvalidArgumentError: the first field outside its limits.
    """
    _check_sequence("request", request.sequence_id)
    if request.base_length < 1:
        raise InvalidArgumentError("request.base_length", request.base_length, "must be at least 1")
    check_range("request.next_id", request.next_id, 0, vocab_size - 1)
    check_range("request.num_tokens", request.num_tokens, 1, max_draft_tokens)
    check_range("request.num_outcomes", request.num_outcomes, 0, MAX_OUTCOMES)
    if request.HasField("terms"):
        terms = request.terms
        check_range("request.terms.max_tokens", terms.max_tokens, request.num_tokens, max_draft_tokens)
        for name in ("row_price", "min_gain"):
            if not (value := getattr(terms, name)) >= 0:  # nor NaN
                raise InvalidArgumentError(f"request.terms.{name}", value, "must be at least 0")


def _check_constraint(entry: OpenSequence) -> None:
    validate_constraint(entry.constraint, prefix="open.")
    if entry.sampling.ignore_eos:
        raise InvalidArgumentError("open.sampling.ignore_eos", True, "must be false with a constraint")
    if not entry.eos_token_ids:
        raise InvalidArgumentError("open.eos_token_ids", "0 entries", "must be at least 1 with a constraint")


def _check_sequence(entry: str, sequence_id: int) -> None:
    if sequence_id == 0:
        raise InvalidArgumentError(f"{entry}.sequence_id", 0, "must be at least 1")


def _check_per_node(field: str, count: int, num_drafts: int) -> None:
    if count != num_drafts:
        raise InvalidArgumentError(field, f"{count} entries", f"must be absent or one per draft token, {num_drafts}")


def _check_parents(parents: Sequence[int], num_drafts: int, supports_trees: bool) -> None:
    _check_per_node("block.parents", len(parents), num_drafts)
    if (index := num_sound(parents)) < num_drafts:
        limit = f"must be -1 to {index - 1}, parents come first"
        raise InvalidArgumentError(f"block.parents[{index}]", parents[index], limit)
    if not supports_trees and (index := leading_chain(parents)) < num_drafts:
        limit = f"must be {index - 1}, as this worker takes chains only"
        raise InvalidArgumentError(f"block.parents[{index}]", parents[index], limit)
