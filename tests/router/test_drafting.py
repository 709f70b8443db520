"""States of a request's drafting: each event in each state leads somewhere or is refused, and no session leaks."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest

from betoken.common.economy.terms import AskingTime
from betoken.common.errors import InternalError, InvalidArgumentError, ResourceExhaustedError
from betoken.router.request.generation import GenerationRequest
from betoken.router.round.draft_timeouts import DraftTimeouts
from betoken.router.round.drafting import TRANSITIONS, DraftingEvent, DraftingState, after
from betoken.router.round.speculator import Speculator
from betoken.router.workers.draft import Draft
from betoken.router.workers.draft_session import DraftFailedError, DraftLateError, DraftWorkerLostError
from betoken.router.workers.drafter_record import DrafterRecord
from betoken.v1.types_pb2 import (
    VERIFICATION_MODE_COUPLED,
    VERIFICATION_MODE_REJECTION,
    DrafterChoice,
    SamplingParams,
    VerificationMode,
    WorkerHello,
)

PAIRS = list(product(DraftingState, DraftingEvent))
DEFINED = [(state, event) for state, event in PAIRS if event in TRANSITIONS[state]]


def walks(
    num_walks: int = 200, num_events: int = 30
) -> Iterator[list[tuple[DraftingState, DraftingEvent, DraftingState]]]:
    """Random walks through the table, each from CLOSED."""
    for seed in range(num_walks):
        choose = random.Random(seed).choice
        state, steps = DraftingState.CLOSED, []
        for _ in range(num_events):
            event = choose(sorted(TRANSITIONS[state], key=lambda event: event.value))
            steps.append((state, event, after(state, event)))
            state = steps[-1][2]
        yield steps


@pytest.mark.parametrize(("state", "event"), PAIRS)
def test_every_event_in_every_state_leads_to_a_state_or_is_refused_by_name(
    state: DraftingState, event: DraftingEvent
) -> None:
    if (state, event) in DEFINED:
        assert after(state, event) in DraftingState
    else:
        with pytest.raises(ValueError, match=rf"^{event.name} cannot happen in the drafting state {state.name}$"):
            after(state, event)


def test_every_state_is_reached_from_the_first() -> None:
    assert {following for walk in walks() for _, _, following in walk} == set(DraftingState)


def test_a_sequence_is_opened_only_where_none_is_open_and_closed_from_everywhere() -> None:
    for state, event in DEFINED:
        assert (event is DraftingEvent.OPENED) == (after(state, event).is_open and not state.is_open)
    for state in DraftingState:
        assert not after(state, DraftingEvent.CLOSED).is_open
        assert not after(state, DraftingEvent.FAILED).is_open


def test_who_is_refused_stays_refused() -> None:
    for event in TRANSITIONS[DraftingState.REFUSED]:
        assert after(DraftingState.REFUSED, event) is DraftingState.REFUSED


def test_the_prefill_is_over_once_a_draft_has_come_since_the_opening() -> None:
    for walk in walks():
        has_drafted = False
        for _, event, following in walk:
            if event is DraftingEvent.CAME:
                has_drafted = True
            elif not following.is_open:
                has_drafted = False
            assert following.has_drafted == has_drafted


class FakeSession:
    """A sequence whose drafts end as configured."""

    def __init__(self) -> None:
        self.outcome: Exception | None = None
        self.is_late = self.is_closed = False
        self.num_missed_tokens = self.num_caught_up = 0
        self.timeouts_s: list[float] = []

    async def draft(
        self, base_length: int, next_id: int, num_tokens: int, vocab_size: int, timeout_s: float, **_: Any
    ) -> Draft:
        assert not self.is_closed
        self.timeouts_s.append(timeout_s)
        if self.outcome is not None:
            raise self.outcome
        return Draft([1])

    def commit(self, base_length: int, ids: list[int]) -> None:
        assert not self.is_closed

    async def catch_up(self, base_length: int, next_id: int) -> None:
        assert not self.is_closed
        self.num_caught_up, self.is_late = self.num_missed_tokens, True

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True


class FakePool:
    """One draft worker."""

    known_drafters = ("ngram",)

    def __init__(self) -> None:
        self.sessions: list[FakeSession] = []
        self.worker = Mock(id="w", drafters=["ngram"], asking=AskingTime(), is_draining=False, is_silent=False)
        self.worker.hello = WorkerHello(max_draft_tokens=4)
        self.worker.open, self.worker.record_of = self.open, DrafterRecord
        self.can_open = True

    @property
    def open_sessions(self) -> list[FakeSession]:
        return [session for session in self.sessions if not session.is_closed]

    def open(self, *_: Any) -> FakeSession:
        if not self.can_open:
            raise DraftFailedError("gone")
        self.sessions.append(FakeSession())
        return self.sessions[-1]

    def least_loaded(self, drafter: str, without: Any = ()) -> Any:
        return None if self.worker in without else self.worker


def speculator(
    pool: FakePool,
    settings: dict[str, str] | None = None,
    mode: VerificationMode = VERIFICATION_MODE_COUPLED,
    **fields: Any,
) -> Speculator:
    choice = DrafterChoice(name="ngram", settings=settings or {})
    fields |= {"drafter": choice}
    request = GenerationRequest("r", [1], SamplingParams(), mode, (), 100, **fields)
    return Speculator(request, pool, 10, DraftTimeouts(1.0, 9.0))  # type: ignore[arg-type]


OUTCOMES: tuple[Exception | None, ...] = (
    None,
    None,
    DraftLateError("late"),
    DraftFailedError("wrong"),
    DraftWorkerLostError("lost"),
    InternalError("failed"),
    ResourceExhaustedError("full"),
)


def test_whatever_happens_one_sequence_is_open_at_most_and_none_at_the_end() -> None:
    async def run(seed: int) -> None:
        choose = random.Random(seed).choice
        pool = FakePool()
        drafts = speculator(pool)
        for length in range(60):
            pool.can_open = choose((True, True, False))
            for session in pool.open_sessions:
                session.is_late, session.outcome = choose((True, False)), choose(OUTCOMES)
            if drafts.is_available:
                await drafts.draft([0] * length, 4, takes_trees=False)
            drafts.commit(length + 1, [0], None)
            if choose(range(20)) == 0:
                drafts.close()
            assert len(pool.open_sessions) <= 1
        drafts.close()
        drafts.close()
        assert not pool.open_sessions and pool.sessions

    for seed in range(50):
        asyncio.run(run(seed))


async def test_the_first_draft_has_its_prefills_time_where_drafts_choose_tokens() -> None:
    pool = FakePool()
    drafts = speculator(pool, mode=VERIFICATION_MODE_REJECTION)
    await drafts.draft([], 4, takes_trees=False)  # opens it
    (session,) = pool.sessions
    await drafts.draft([], 4, takes_trees=False)
    assert session.timeouts_s == [9.0, 1.0]


async def test_a_draft_is_waited_for_equally_long_before_and_after_the_prefill() -> None:
    pool = FakePool()
    drafts = speculator(pool)
    late = FakeSession()
    late.outcome = DraftLateError("late")
    pool.worker.open = lambda *_: late
    assert not (await drafts.draft([], 4, takes_trees=False)).ids
    late.outcome = None
    assert (await drafts.draft([], 4, takes_trees=False)).ids
    assert (await drafts.draft([], 4, takes_trees=False)).ids
    assert late.timeouts_s == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("num_missed", "is_waited_for"), [(64, True), (65, False), (500, False)])
async def test_a_round_waits_for_few_missed_tokens_only(num_missed: int, is_waited_for: bool) -> None:
    pool = FakePool()
    drafts = speculator(pool)
    await drafts.draft([], 4, takes_trees=False)
    (session,) = pool.sessions
    session.num_missed_tokens = num_missed
    draft = await drafts.draft([0] * num_missed, 4, takes_trees=False)
    assert bool(draft.ids) == is_waited_for and drafts.is_available == is_waited_for
    assert session.num_caught_up == (0 if is_waited_for else num_missed) and not drafts.failures
    session.is_late, session.num_missed_tokens = False, 3  # the drafter is up to date
    assert drafts.is_available and (await drafts.draft([0] * (num_missed + 3), 4, takes_trees=False)).ids


async def test_drafts_that_choose_tokens_are_waited_for_after_a_pause() -> None:
    pool = FakePool()
    drafts = speculator(pool, mode=VERIFICATION_MODE_REJECTION)
    await drafts.draft([], 4, takes_trees=False)
    pool.sessions[0].num_missed_tokens = 500
    assert (await drafts.draft([0] * 500, 4, takes_trees=False)).ids


async def test_a_refused_request_is_never_opened_again() -> None:
    pool = FakePool()
    drafts = speculator(pool)
    await drafts.draft([], 4, takes_trees=False)
    pool.sessions[0].outcome = InvalidArgumentError("max_length", 9, "must be less")
    assert not (await drafts.draft([], 4, takes_trees=False)).ids
    assert not drafts.is_available
    assert not (await drafts.draft([], 4, takes_trees=False)).ids
    assert len(pool.sessions) == 1 and pool.sessions[0].is_closed


async def test_settings_that_no_worker_has_taken_are_refused_as_the_requests_own() -> None:
    pool = FakePool()
    drafts = speculator(pool, settings={"max_ngram": "x"})
    refusing = FakeSession()
    refusing.outcome = InvalidArgumentError("drafter.settings[max_ngram]", "x", "must be a number")
    pool.worker.open = lambda *_: refusing
    with pytest.raises(InvalidArgumentError, match=r"^speculation\.drafter\.settings\[max_ngram\] = x: must"):
        await drafts.draft([], 4, takes_trees=False)
    assert refusing.is_closed


@pytest.mark.parametrize("before", ["nobody there", "late"])
async def test_settings_that_are_refused_after_the_first_token_end_no_answer(before: str) -> None:
    pool = FakePool()
    drafts = speculator(pool, settings={"max_ngram": "x"})
    first, refusing = FakeSession(), FakeSession()
    first.outcome = DraftLateError("late") if before == "late" else DraftFailedError("no draft worker")
    refusing.outcome = InvalidArgumentError("drafter.settings[max_ngram]", "x", "must be a number")
    sessions = [first, refusing]
    pool.worker.open = lambda *_: sessions.pop(0)
    assert not (await drafts.draft([], 4, takes_trees=False)).ids
    if before == "late":  # and then it refuses
        first.outcome = refusing.outcome
    assert not (await drafts.draft([7], 4, takes_trees=False)).ids
    assert not drafts.is_available


@pytest.mark.parametrize("begun", [{"is_further": True}, {"resume_ids": [7]}])
async def test_settings_that_are_refused_in_a_reply_that_has_begun_end_nothing(begun: dict[str, Any]) -> None:
    pool = FakePool()
    drafts = speculator(pool, settings={"max_ngram": "x"}, **begun)
    refusing = FakeSession()
    refusing.outcome = InvalidArgumentError("drafter.settings[max_ngram]", "x", "must be a number")
    pool.worker.open = lambda *_: refusing
    assert not (await drafts.draft([], 4, takes_trees=False)).ids
    assert not drafts.is_available


def test_workers_receive_an_opaque_hash_of_the_tenant() -> None:
    hashes = [
        GenerationRequest("r", [1], SamplingParams(), VERIFICATION_MODE_COUPLED, (), 9, tenant=tenant)
        .open_entry(1, [])
        .tenant_hash
        for tenant in ("research", "research", "sales", "")
    ]
    assert hashes[0] == hashes[1] and len(set(hashes)) == 3
    assert all(len(tenant_hash) == 16 and b"research" not in tenant_hash for tenant_hash in hashes)
