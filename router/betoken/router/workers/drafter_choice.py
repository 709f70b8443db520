"""Selects a request's drafter, and its default draft length.

A client's choice is checked against all draft workers met so far; a worker never met may host any drafter. A resumed
request is not rejected: another router accepted it, and a drafter missing here costs drafts, not tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.router.request.generation import AUTO_DRAFTER
from betoken.router.workers.fleet import Fleet
from betoken.v1.generation_pb2 import Speculation
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_UNSPECIFIED,
    DrafterChoice,
    WorkerHello,
)

NO_DRAFTER = "none"


@dataclass(frozen=True, slots=True)
class Drafters:
    """The drafters of one router's workers, with its defaults."""

    fleet: Fleet
    default_name: str
    """Value of --drafter."""
    num_draft_tokens: int
    """Value of --num-draft-tokens; 0 = adaptive."""

    @property
    def default(self) -> str:
        """Drafter of requests that name none; empty = no speculation, or no connected worker hosts it."""
        name, known = self.default_name, self.fleet.known_drafters
        return name if name in known or (name == AUTO_DRAFTER and known) else ""

    def choose(self, speculation: Speculation, *, is_predicted: bool, is_resumed: bool) -> DrafterChoice | None:
        """The drafter for a request, with a prediction or without; None = decoding without speculation.

        Raises:
            InvalidArgumentError: a drafter that no draft worker of this router hosts, settings or a draft length for no
                drafter, or a prediction that the drafter does not look up.
        """
        choice = self._choose(speculation, is_resumed=is_resumed)
        return self._predicting(choice, speculation, is_resumed=is_resumed) if is_predicted else choice

    def check_num_draft_tokens(self, speculation: Speculation, model: WorkerHello) -> None:
        """Check a draft length against the limits of the verify workers and the draft workers met so far.

        Raises:
            InvalidArgumentError: it is longer.
        """
        limit = self.fleet.max_draft_tokens(model)
        if limit and speculation.num_draft_tokens > limit:
            raise InvalidArgumentError(
                "speculation.num_draft_tokens", speculation.num_draft_tokens, f"must be 1 to {limit}"
            )

    def default_num_draft_tokens(self, model: WorkerHello) -> int:
        """Default number of draft tokens per round; 0 = adaptive."""
        return min(self.num_draft_tokens, self.fleet.max_draft_tokens(model) or self.num_draft_tokens)

    def _choose(self, speculation: Speculation, *, is_resumed: bool) -> DrafterChoice | None:
        if speculation.off:
            return None
        draft = self.fleet.draft
        known, named = self.fleet.known_drafters, speculation.drafter.name
        default_name = AUTO_DRAFTER if named == AUTO_DRAFTER else self.default_name
        named = "" if named == AUTO_DRAFTER else named
        is_certain = draft.has_met_all and not is_resumed
        if named and is_certain and named not in known:
            limit = f"must be one of: {', '.join(known) or '(none)'}"
            raise InvalidArgumentError("speculation.drafter.name", named, limit)
        choice = DrafterChoice(name=named or default_name, settings=speculation.drafter.settings)
        is_hosted = bool(known) if choice.name == AUTO_DRAFTER else choice.name in known
        why_none = ""
        if not draft.workers and not known:
            why_none = "must be absent: this router has no draft workers"
        elif not named and choice.name == NO_DRAFTER:
            why_none = "must come with a drafter's name: this router has no default drafter"
        elif not named and draft.has_met_all and not is_hosted:
            why_none = f"must come with a drafter's name: the router's default, {choice.name}, is hosted nowhere"
        if why_none:
            if not is_resumed:
                _reject_terms(speculation, why_none)
            return None
        if choice.name == AUTO_DRAFTER and not _is_free(speculation):
            choice.name = next(iter(self.fleet.ready_drafters or known), "")
        return choice

    def _predicting(
        self, choice: DrafterChoice | None, speculation: Speculation, *, is_resumed: bool
    ) -> DrafterChoice | None:
        """`choice` for a request with a prediction, or a drafter that looks it up if the request names none."""
        predicting = self.fleet.predicting_drafters
        if choice is not None and choice.name in predicting:
            return choice
        is_free = speculation.drafter.name in ("", AUTO_DRAFTER) and not speculation.drafter.settings
        if is_free and predicting:
            ready = (name for name in self.fleet.ready_drafters if name in predicting)
            return DrafterChoice(name=next(ready, predicting[0]))
        if is_resumed or not self.fleet.draft.has_met_all:
            return choice
        if not predicting:
            limit = "must be absent: no drafter here looks predictions up"
        else:
            limit = f"must be absent: of the drafters {', '.join(predicting)} looks predictions up"
        raise InvalidArgumentError("prediction", "set", limit)


def _is_free(speculation: Speculation) -> bool:
    """Whether any drafter will do: settings are one drafter's, and in modes whose tokens depend on drafts the clock
    must not choose it."""
    is_coupled = speculation.mode in (VERIFICATION_MODE_UNSPECIFIED, VERIFICATION_MODE_COUPLED)
    return is_coupled and not speculation.drafter.settings


def _reject_terms(speculation: Speculation, limit: str) -> None:
    if speculation.drafter.settings:
        raise InvalidArgumentError("speculation.drafter.settings", dict(speculation.drafter.settings), limit)
    if speculation.HasField("num_draft_tokens"):
        raise InvalidArgumentError("speculation.num_draft_tokens", speculation.num_draft_tokens, limit)
