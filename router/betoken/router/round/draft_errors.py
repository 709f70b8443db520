"""Errors of draft requests: their reason in statistics, and the field of the request that caused them."""

from __future__ import annotations

from betoken.common.errors import DeadlineExceededError, InvalidArgumentError, ResourceExhaustedError
from betoken.router.request.generation import GenerationRequest
from betoken.router.workers.draft_session import DraftTimeoutError, DraftUnavailableError, DraftWorkerLostError


def failure_reason(error: Exception) -> str:
    """Return the reason of a failed draft, as statistics name it."""
    if isinstance(error, InvalidArgumentError):
        return "rejected"
    if isinstance(error, ResourceExhaustedError):
        return "full"
    if isinstance(error, DraftTimeoutError | DeadlineExceededError):
        return "timeout"
    is_lost = isinstance(error, DraftWorkerLostError | DraftUnavailableError)
    return "lost" if is_lost else "fault"


def of_request(error: InvalidArgumentError, request: GenerationRequest) -> InvalidArgumentError:
    """Return a worker's rejection of a drafter with the field of the request it came from."""
    if error.field == "drafter.name" or error.field.startswith("drafter.settings"):
        return InvalidArgumentError(f"speculation.{error.field}", error.value, error.limit)
    settings = dict(request.drafter.settings) if request.drafter is not None else {}
    return InvalidArgumentError("speculation.drafter.settings", settings, str(error))
