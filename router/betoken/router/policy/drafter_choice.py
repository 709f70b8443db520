"""Which drafter a request gets, and how long its drafts may be.

A client's choice is checked against the draft workers met so far; while some were never met, they may host anything. Of
a request that goes on from a broken stream nothing is refused: another router took it, and what this one lacks costs
drafts, no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from betoken.common.errors import InvalidArgumentError
from betoken.router.core import Router
from betoken.router.settings import AUTO_DRAFTER, NO_DRAFTER
from betoken.v1.generation_pb2 import Speculation
from betoken.v1.types_pb2 import DrafterChoice, WorkerHello


def default_drafter(router: Router) -> str:
    """Drafter of requests that name none; empty = no speculation, or no connected worker hosts it."""
    name, known = router.settings.drafter, router.known_drafters
    if name == AUTO_DRAFTER:
        return next(iter(router.ready_drafters or known), "")
    return name if name in known else ""


def choose_drafter(speculation: Speculation, router: Router, *, is_resumed: bool) -> DrafterChoice | None:
    """The drafter for a request; None = plain decoding.

    Raises:
        InvalidArgumentError: a name that no draft worker of this router hosts, or settings or a draft length for no
            drafter.
    """
    if speculation.off:
        return None
    known, named = router.known_drafters, speculation.drafter.name
    is_certain = router.draft.has_met_all and not is_resumed
    if named and is_certain and named not in known:
        limit = f"must be one of: {', '.join(known) or '(none)'}"
        raise InvalidArgumentError("speculation.drafter.name", named, limit)
    choice = DrafterChoice(name=named or router.settings.drafter, settings=speculation.drafter.settings)
    why_none = ""
    if not router.draft.workers and not known:
        why_none = "must be absent: this router has no draft workers"
    elif not named and choice.name == NO_DRAFTER:
        why_none = "must come with a drafter's name: this router has no default drafter"
    elif not named and router.draft.has_met_all and not default_drafter(router):
        why_none = f"must come with a drafter's name: the router's default, {choice.name}, is hosted nowhere"
    if why_none:
        if not is_resumed:
            _refuse_terms(speculation, why_none)
        return None
    if not named and choice.name == AUTO_DRAFTER:
        choice.name = default_drafter(router)
    return choice


def choose_predicting(
    choice: DrafterChoice | None, speculation: Speculation, router: Router, *, is_resumed: bool
) -> DrafterChoice | None:
    """The drafter for a request with a prediction: `choice`, or a drafter that uses predictions if none is named.

    Raises:
        InvalidArgumentError: no such drafter is to be had, or another was asked for.
    """
    predicting = router.predicting_drafters
    if choice is not None and choice.name in predicting:
        return choice
    is_free = not speculation.drafter.name and not speculation.drafter.settings
    if is_free and predicting:
        return DrafterChoice(name=next((name for name in router.ready_drafters if name in predicting), predicting[0]))
    if is_resumed or not router.draft.has_met_all:
        return choice
    if not predicting:
        limit = "must be absent: no drafter here looks predictions up"
    else:
        limit = f"must be absent: of the drafters {', '.join(predicting)} looks predictions up"
    raise InvalidArgumentError("prediction", "set", limit)


def check_num_draft_tokens(speculation: Speculation, model: WorkerHello, router: Router) -> None:
    """Hold a draft length against what the verify workers and the draft workers met so far take.

    Raises:
        InvalidArgumentError: it is longer.
    """
    limit = _max_draft_tokens(model, router)
    if limit and speculation.num_draft_tokens > limit:
        raise InvalidArgumentError(
            "speculation.num_draft_tokens", speculation.num_draft_tokens, f"must be 1 to {limit}"
        )


def default_num_draft_tokens(model: WorkerHello, router: Router) -> int:
    """Default number of draft tokens per round; 0 = adaptive."""
    wanted = router.settings.num_draft_tokens
    return min(wanted, _max_draft_tokens(model, router) or wanted)


def _max_draft_tokens(model: WorkerHello, router: Router) -> int:
    """Largest block that the verify workers and every draft worker met so far take; 0 = not known."""
    hellos: Sequence[WorkerHello | None] = [model, *(worker.link.hello for worker in router.draft.workers)]
    return min((hello.max_draft_tokens for hello in hellos if hello is not None and hello.max_draft_tokens), default=0)


def _refuse_terms(speculation: Speculation, limit: str) -> None:
    if speculation.drafter.settings:
        raise InvalidArgumentError("speculation.drafter.settings", dict(speculation.drafter.settings), limit)
    if speculation.HasField("num_draft_tokens"):
        raise InvalidArgumentError("speculation.num_draft_tokens", speculation.num_draft_tokens, limit)
