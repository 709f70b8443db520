"""A router, a draft worker, a verify worker and clients without a clock, which decide by the project's own code.

Real: gate, step timer, terms, pauses, price of a row, the choice between sources, n-grams and their calibration.
Simulated: forwards, messages and the draft model, by recorded times and texts.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from betoken.bench.economy.drafting import DraftService, Request
from betoken.bench.economy.machine import Machine
from betoken.bench.economy.recorded import Costs, Text
from betoken.bench.economy.verifying import Load, VerifyService
from betoken.common.economy.policy import SpeculationPolicy
from betoken.common.economy.terms import (
    MAX_DRAFT_TOKENS,
    USUAL_DRAFT_TOKENS,
    AskingTime,
    EmptyDraftPause,
    PriceExploration,
    row_seconds,
    terms_at,
)
from betoken.common.step_times import ForwardTimes, StepTimes
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.router.round.round_loop import NUM_GRANTED_STEPS
from betoken.router.round.step_timer import StepTimer

_LONGEST_S = 6000.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests, and how many clients send them, each the next one after an answer."""

    texts: Sequence[Text]
    num_streams: int
    num_tokens: int
    """Tokens of an answer."""


@dataclass(slots=True)
class Outcome:
    """The result of a run."""

    num_tokens: int = 0
    seconds: float = 0.0
    num_forwards: int = 0
    num_rounds: int = 0
    """Drafts asked for."""
    num_drafts: int = 0
    """Drafts that came with tokens."""
    num_draft_tokens: int = 0
    num_accepted: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    """Accepted tokens by who drafted them."""

    @property
    def tokens_per_s(self) -> float:
        """All streams together."""
        return self.num_tokens / self.seconds


class Simulation:
    """Services that stay up, so that a second workload begins with what the first taught."""

    def __init__(self, costs: Costs, drafter: str, seed: int | None = None) -> None:
        """`drafter`: `none`, `model`, `ngram` or `fused`.

        `seed`: of the machine's noise; None = every job takes its recorded time.
        """
        self.machine = Machine(costs.cores, None if seed is None else random.Random(seed))
        self.costs = costs
        self.outcome = Outcome()
        self.num_running = 0
        self.policy = SpeculationPolicy(lambda: self.num_running)
        self.asking = AskingTime()
        self.trials = PriceExploration()
        self.load = Load(0, 0.0, 0.0, 0.0)
        self.step_times = StepTimes([(cost.rows, cost.ns) for cost in costs.verify.step_costs()])
        self.drafting = None if drafter == "none" else DraftService(self.machine, costs, drafter)
        self.verifying = VerifyService(self.machine, costs, self._take_results)
        self._num_opened = 0
        self._tasks: list[tuple[float, Callable[[], None]]] = []
        self._is_busy = False

    def run(self, workload: Workload) -> Outcome:
        """All answers of a workload, and what they took."""
        self.outcome = Outcome()
        began_s, num_before = self.machine.now_s, self.verifying.num_forwards
        texts = [Text(t.prompt_ids, t.answer_ids[: workload.num_tokens], t.model_right) for t in workload.texts]
        texts.reverse()

        def next_request() -> None:
            if texts:
                self.num_running += 1
                self._num_opened += 1
                _Stream(self, (1, self._num_opened), texts.pop(), next_request)

        for _ in range(workload.num_streams):
            next_request()
        self.machine.run(began_s + _LONGEST_S)
        self.outcome.seconds = self.machine.now_s - began_s
        self.outcome.num_forwards = self.verifying.num_forwards - num_before
        return self.outcome

    def route(self, seconds: float, then: Callable[[], None]) -> None:
        """Work of the router, one thing after another."""
        self._tasks.append((seconds, then))
        self._route_next()

    def _route_next(self) -> None:
        if self._is_busy or not self._tasks:
            return
        self._is_busy = True
        seconds, then = self._tasks.pop(0)

        def done() -> None:
            self._is_busy = False
            then()
            self._route_next()

        self.machine.work(seconds, 1, done)

    def _take_results(self, results: list[Callable[[], None]], load: Load) -> None:
        def take() -> None:
            self.load = load
            for result in results:
                result()

        seconds = self.costs.router_frame_s + self.costs.router_entry_s * len(results)
        self.machine.after(self.costs.hop_s, lambda: self.route(seconds, take))


class _Stream:
    """One request, as the router's `Generation` goes on with it."""

    def __init__(self, simulation: Simulation, key: tuple[int, int], text: Text, done: Callable[[], None]) -> None:
        self._sim, self._key, self._text, self._done = simulation, key, text, done
        self._machine, self._hop_s = simulation.machine, simulation.costs.hop_s
        self._timer = StepTimer(simulation.policy if simulation.drafting is not None else None)
        self._length = simulation.policy.open_sequence()
        self._pause = EmptyDraftPause()
        self._num_output = self._granted = 0
        self._commits: list[int] = []
        self._draft: Drafted | None = None
        self._began_s: float | None = None
        self._drafting: DraftSequence | None = None
        self._verifying = simulation.verifying.open(text, self._decided)
        self._has_drafted = False
        simulation.route(simulation.costs.request_s, self._advance)

    @property
    def _room(self) -> int:
        return len(self._text.answer_ids) - self._num_output

    @property
    def _may_draft(self) -> bool:
        return self._sim.drafting is not None and self._sim.policy.is_on and not self._length.is_paused

    def _times(self) -> ForwardTimes:
        load = self._sim.load
        token_s = row_seconds(load.row_price, load.tokens_per_s)
        return self._sim.step_times.at_load(max(1, load.running), token_s, load.step_time_ratio)

    def _advance(self) -> None:
        self._began_s = self._machine.now_s if self._num_output else None  # the prompt's prefill is in the first step
        if self._num_output >= self._granted and self._room > 1 and self._may_draft:
            self._ask()
            return
        num_left = self._granted - self._num_output
        if num_left <= 0 or (num_left <= NUM_GRANTED_STEPS // 2 and not self._may_draft):
            num_steps = min(NUM_GRANTED_STEPS, self._room)
            if num_steps > num_left:
                self._grant(num_steps)

    def _ask(self) -> None:
        sim, load = self._sim, self._sim.load
        assert sim.drafting is not None
        if self._drafting is None:
            self._drafting = sim.drafting.open(self._key, self._text, self._num_output)
            self._commits = []
        self._timer.asks(is_first=not self._has_drafted)
        limit = min(self._room - 1, MAX_DRAFT_TOKENS)
        terms = terms_at(load.tokens_per_s, load.running, load.row_price, limit, sim.asking.mean_s)
        if terms is not None:
            terms = sim.trials.terms(terms)
        num_tokens = min(limit, USUAL_DRAFT_TOKENS)
        if (time := sim.policy.round_time(self._times())) is not None:
            num_tokens = self._length.next(time, limit, can_pause=sim.policy.can_pause)
            if not num_tokens:
                self._advance()
                return
        asked_s, commits = self._machine.now_s, self._commits
        self._commits = []
        sim.outcome.num_rounds += 1

        def arrived(drafted: Drafted, drafting_s: float) -> None:
            def taken() -> None:
                if self._has_drafted:
                    sim.asking.record(self._machine.now_s - asked_s - drafting_s)
                waited_s = self._machine.now_s - asked_s
                self._timer.came(len(drafted.draft_ids), waited_s)
                if self._has_drafted:
                    sim.policy.add_draft(len(drafted.draft_ids), drafted.num_forwards, waited_s, drafting_s)
                self._has_drafted = True
                if terms is not None:
                    sim.trials.came(terms, len(drafted.draft_ids))
                self._send(drafted)

            self._machine.after(self._hop_s, lambda: sim.route(sim.costs.router_frame_s, taken))

        request = Request(self._drafting, commits, num_tokens, terms, arrived)
        drafting = sim.drafting
        self._machine.after(self._hop_s, lambda: drafting.request(request))

    def _send(self, drafted: Drafted) -> None:
        self._draft = drafted if drafted.draft_ids else None
        if self._draft is None:
            self._grant(min(self._pause.empty(), self._room))
            return
        self._pause.drafted()
        self._sim.outcome.num_drafts += 1
        self._sim.outcome.num_draft_tokens += len(drafted.draft_ids)
        verifying = self._sim.verifying
        self._machine.after(self._hop_s, lambda: verifying.verify(self._verifying, drafted.draft_ids, drafted.parents))

    def _grant(self, num_steps: int) -> None:
        self._granted = self._num_output + num_steps
        until, verifying = self._granted, self._sim.verifying
        self._machine.after(self._hop_s, lambda: verifying.grant(self._verifying, until))

    def _decided(self, ids: list[int], num_accepted: int) -> None:
        outcome = self._sim.outcome
        self._num_output += len(ids)
        outcome.num_tokens += len(ids)
        outcome.num_accepted += num_accepted
        if self._draft is not None and self._draft.sources:
            outcome.sources[self._draft.sources[0]] += num_accepted
        if self._draft is not None and self._draft.num_forwards:
            self._length.add(len(self._draft.draft_ids), num_accepted)
        self._length.add_tokens(len(ids))
        self._draft = None
        self._commits += ids
        if self._drafting is not None:
            self._sim.trials.add_tokens(len(ids))
        if self._room > 0:
            self._timer.commit(
                len(ids), self._began_s, self._machine.now_s, self._times(), can_draft=self._drafting is not None
            )
            self._advance()
            return
        self._length.close()
        self._sim.verifying.close(self._verifying)
        if self._drafting is not None and self._sim.drafting is not None:
            self._sim.drafting.close(self._drafting)
        self._sim.num_running -= 1
        self._done()
