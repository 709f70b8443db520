"""Compiles a request's constraint in the router, to reject an invalid one before any work on it.

Workers compile the constraint again for themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.router.text.encoding import on_text_thread
from betoken.router.text.thought import thought_first
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.validation import validate_constraint
from betoken.v1.generation_pb2 import GenerateRequest
from betoken.v1.types_pb2 import Constraint, SamplingParams, WorkerHello


@dataclass(frozen=True, slots=True)
class ConstraintLimits:
    """Limits of one constraint."""

    max_bytes: int
    timeout_s: float
    """Longest time to compile, seconds."""


async def check_constraint(
    message: GenerateRequest,
    model: WorkerHello,
    sampling: SamplingParams,
    eos_token_ids: Sequence[int],
    prompt_ids: Sequence[int],
    tokenizer: Tokenizer,
    limits: ConstraintLimits,
) -> Constraint | None:
    """The constraint of the answer's ids, thoughts included, None without one; `sampling` is resolved.

    Raises:
        InvalidArgumentError: the constraint is malformed, too large or too slow to compile; the workers cannot keep it;
            nothing would end it; or it refuses `resume_ids`.
    """
    if not message.HasField("constraint"):
        return None
    constraint = message.constraint
    validate_constraint(constraint, limits.max_bytes)
    field = f"constraint.{constraint.WhichOneof('kind')}"
    if not model.supports_constraints:
        raise InvalidArgumentError(field, "set", "must be absent, as the verify workers keep none for this tokenizer")
    if not eos_token_ids:
        raise InvalidArgumentError(field, "set", "must be absent, as the model has no EOS that would end the answer")
    if sampling.ignore_eos:
        raise InvalidArgumentError("sampling.ignore_eos", True, "must be false with a constraint, which EOS ends")
    resume_ids = message.resume_ids
    grammars = await on_text_thread(lambda: tokenizer.grammars, 0)  # takes a second or some at its first use
    is_new_turn = message.WhichOneof("input") == "messages" and not message.messages.continue_final_message

    def compile_() -> tuple[Constraint, int]:
        matcher, whole = grammars.compile(constraint), constraint
        if is_new_turn and (whole := thought_first(constraint, prompt_ids, tokenizer)) is not constraint:
            matcher = grammars.compile(whole, field)
        return whole, grammars.num_allowed(matcher, resume_ids, eos_token_ids)

    try:
        async with asyncio.timeout(limits.timeout_s):
            whole, num_allowed = await on_text_thread(compile_, constraint.ByteSize())
    except TimeoutError:
        limit = f"must compile within {limits.timeout_s:g} s (--constraint-timeout-s)"
        raise InvalidArgumentError(field, f"{constraint.ByteSize()} bytes", limit) from None
    if num_allowed < len(resume_ids):
        raise InvalidArgumentError(
            "resume_ids", f"{len(resume_ids)} ids", f"must be allowed by the constraint; {num_allowed} are"
        )
    return whole
