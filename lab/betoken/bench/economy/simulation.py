"""A router, a draft worker, a verify worker and clients without a clock, which decide by the project's own code.

Real: speculation policy, step timer, terms, pauses, price of a row, the choice between sources, n-grams and their
calibration.
Simulated: forwards, messages and the draft model, by recorded times and texts.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from betoken.bench.economy.drafting import DraftService, Request
from betoken.bench.economy.machine import Machine
from betoken.bench.economy.recorded import Costs, Text
from betoken.bench.economy.verifying import Load, VerifyService
from betoken.common.economy.policy import SpeculationPolicy, load_level
from betoken.common.economy.source_rates import Candidate, SourceRates
from betoken.common.economy.terms import (
    MAX_DRAFT_TOKENS,
    AskingTime,
    EmptyDraftPause,
    PriceExploration,
    row_seconds,
    terms_at,
)
from betoken.common.step_times import ForwardTimes, StepTimes
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.router.round.adaptive_length import AdaptiveLength
from betoken.router.round.request_sources import SETTLING_TOKENS
from betoken.router.round.round_loop import NUM_GRANTED_STEPS
from betoken.router.round.step_timer import StepTimer
from betoken.router.workers.draft import Draft

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
        """`drafter`: `none`, `model`, `ngram`, `fused`, or `auto`, which selects one of the others.

        `seed`: of the machine's noise; None = every job takes its recorded time.
        """
        self.machine = Machine(costs.cores, None if seed is None else random.Random(seed))
        self.costs = costs
        self.outcome = Outcome()
        self.num_running = 0
        self.asking = AskingTime()
        self.trials = PriceExploration()
        self.load = Load(0, 0.0, 0.0, 0.0)
        self.step_times = StepTimes([(cost.rows, cost.ns) for cost in costs.verify.step_costs()])
        self.is_auto, self.drafter = drafter == "auto", "fused" if drafter == "auto" else drafter
        self.drafting = None if drafter == "none" else DraftService(self.machine, costs, [self.drafter])
        names = self.drafting.names[::-1] if self.drafting is not None and self.is_auto else [self.drafter]
        self.policies = {name: SpeculationPolicy(lambda: self.num_running) for name in names}
        self.rates: SourceRates[str] = SourceRates()
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


class _Drafts:
    """The drafts of one request by one drafter, as the router's `Speculator` has them."""

    def __init__(self, policy: SpeculationPolicy) -> None:
        self.policy, self.timer, self.length = policy, StepTimer(policy), AdaptiveLength(0, policy)
        self.sequence: DraftSequence | None = None
        self.has_drafted = False
        self._commits: list[int] = []

    @property
    def may_draft(self) -> bool:
        """Whether a draft may be requested now."""
        return (self.policy.is_on or self.timer.is_tried) and not self.length.is_paused

    def commit(self, ids: list[int]) -> None:
        """Add committed tokens."""
        if self.sequence is not None:
            self._commits += ids

    def take_commits(self) -> list[int]:
        """Return the tokens committed since the last request."""
        commits, self._commits = self._commits, []
        return commits

    def close(self, drafting: DraftService) -> None:
        """Free the sequence; the next draft opens it again."""
        if self.sequence is not None:
            drafting.close(self.sequence)
        self.sequence, self.has_drafted, self._commits = None, False, []


class _Stream:
    """One request, as the router's `RoundLoop` goes on with it."""

    def __init__(self, simulation: Simulation, key: tuple[int, int], text: Text, done: Callable[[], None]) -> None:
        self._sim, self._key, self._text, self._done = simulation, key, text, done
        self._machine, self._hop_s = simulation.machine, simulation.costs.hop_s
        self._rates = simulation.rates.open() if simulation.is_auto else None
        self._every: dict[str, _Drafts] = {}
        self._drafts: _Drafts | None = None
        self._source = ""
        self._settled_at = 0
        if simulation.drafting is not None:
            self._select(simulation.drafter)
        self._pause = EmptyDraftPause()
        self._num_output = self._granted = 0
        self._draft: Draft | None = None
        self._began_s: float | None = None
        self._verifying = simulation.verifying.open(text, self._decided)
        simulation.route(simulation.costs.request_s, self._advance)

    @property
    def _room(self) -> int:
        return len(self._text.answer_ids) - self._num_output

    @property
    def _may_draft(self) -> bool:
        return self._drafts is not None and self._drafts.may_draft

    def _times(self) -> ForwardTimes:
        load = self._sim.load
        token_s = row_seconds(load.row_price, load.tokens_per_s)
        return self._sim.step_times.at_load(max(1, load.running), token_s, load.step_time_ratio)

    def _select(self, name: str) -> None:
        if name not in self._every:
            self._every[name] = _Drafts(self._sim.policies[name])
        self._source, self._drafts = name, self._every[name]

    def _choose(self) -> None:
        """Change the source if another is faster or due for a trial, as `RequestSources` does."""
        rates, drafting = self._rates, self._sim.drafting
        if rates is None or drafting is None or not rates.is_due:
            return
        times = self._times()
        candidates = {
            name: Candidate(self._num_missing(name), not policy.is_known_off, partial(policy.trial_loss, times))
            for name, policy in self._sim.policies.items()
        }
        chosen = rates.choose(candidates, load_level(self._sim.num_running))
        assert chosen is not None and self._drafts is not None
        if chosen != self._source:
            self._drafts.length.end()
            self._select(chosen)
            self._settled_at = self._num_output + SETTLING_TOKENS
            for name, each in self._every.items():
                if name not in (chosen, rates.base):
                    each.close(drafting)
        self._drafts.timer.is_tried = rates.base is not None

    def _num_missing(self, name: str) -> int:
        is_open = name in self._every and self._every[name].sequence is not None
        return 0 if is_open else len(self._text.prompt_ids) + self._num_output

    def _advance(self) -> None:
        self._began_s = self._machine.now_s if self._num_output else None  # the prompt's prefill is in the first step
        self._choose()
        if self._num_output >= self._granted and self._room > 1 and self._may_draft:
            self._ask()
            return
        num_left = self._granted - self._num_output
        if num_left <= 0 or (num_left <= NUM_GRANTED_STEPS // 2 and not self._may_draft):
            num_steps = min(NUM_GRANTED_STEPS, self._room)
            if num_steps > num_left:
                self._grant(num_steps)

    def _ask(self) -> None:
        sim, load, drafts = self._sim, self._sim.load, self._drafts
        assert sim.drafting is not None and drafts is not None
        drafting, is_first = sim.drafting, not drafts.has_drafted
        if drafts.sequence is None:
            num_opened = len(self._text.prompt_ids) + self._num_output
            if not (drafts.timer.is_tried or drafts.length.pays_opening(num_opened, self._room, self._times())):
                self._advance()
                return
            drafts.length.opens(num_opened, self._machine.now_s)
            key = (1 + list(sim.policies).index(self._source), self._key[1])
            drafts.sequence = drafting.open(self._source, key, self._text, self._num_output)
        drafts.timer.asks(is_first=is_first)
        limit = min(self._room - 1, MAX_DRAFT_TOKENS)
        terms = terms_at(load.tokens_per_s, load.running, load.row_price, limit, sim.asking.mean_s)
        if terms is not None:
            terms = sim.trials.terms(terms)
        if not (num_tokens := min(limit, drafts.length.next(self._times(), limit, can_pause=True))):
            self._advance()
            return
        asked_s, sequence = self._machine.now_s, drafts.sequence
        sim.outcome.num_rounds += 1

        def arrived(drafted: Drafted, drafting_s: float) -> None:
            def taken() -> None:
                waited_s = self._machine.now_s - asked_s
                drafts.timer.came(len(drafted.draft_ids), waited_s)
                ids, parents, drafting_ns = drafted.draft_ids, drafted.parents or (), round(drafting_s * 1e9)
                draft = Draft(ids, drafted.sources or (), 0, drafting_ns, parents, num_forwards=drafted.num_forwards)
                if is_first:
                    drafts.length.came_first(self._machine.now_s)
                else:
                    sim.asking.record(waited_s - drafting_s)
                    drafts.length.came(draft, waited_s)
                drafts.has_drafted = True
                if terms is not None:
                    sim.trials.came(terms, len(draft.ids))
                self._send(draft)

            self._machine.after(self._hop_s, lambda: sim.route(sim.costs.router_frame_s, taken))

        request = Request(sequence, drafts.take_commits(), num_tokens, terms, arrived)
        self._machine.after(self._hop_s, lambda: drafting.request(request))

    def _send(self, draft: Draft) -> None:
        self._draft = draft if draft.ids else None
        if self._draft is None:
            self._grant(min(self._pause.empty(), self._room))
            return
        self._pause.drafted()
        self._sim.outcome.num_drafts += 1
        self._sim.outcome.num_draft_tokens += len(draft.ids)
        verifying = self._sim.verifying
        self._machine.after(self._hop_s, lambda: verifying.verify(self._verifying, draft.ids, draft.parents or None))

    def _grant(self, num_steps: int) -> None:
        self._granted = self._num_output + num_steps
        until, verifying = self._granted, self._sim.verifying
        self._machine.after(self._hop_s, lambda: verifying.grant(self._verifying, until))

    def _decided(self, ids: list[int], num_accepted: int) -> None:
        outcome, drafts, draft = self._sim.outcome, self._drafts, self._draft
        is_settled = self._num_output >= self._settled_at
        self._num_output += len(ids)
        outcome.num_tokens += len(ids)
        outcome.num_accepted += num_accepted
        self._draft = None
        if draft is not None and draft.sources:
            outcome.sources[draft.sources[0]] += num_accepted
        if drafts is not None:
            if draft is not None:
                drafts.length.verified(draft, num_accepted)
            drafts.length.add_tokens(len(ids))
            if drafts.sequence is not None:
                self._sim.trials.add_tokens(len(ids))
        for each in self._every.values():
            each.commit(ids)
        if self._room > 0:
            if drafts is not None:
                self._record(drafts, len(ids), self._began_s if is_settled else None)
            self._advance()
            return
        self._sim.verifying.close(self._verifying)
        for each in self._every.values():
            each.length.end()
            if self._sim.drafting is not None:
                each.close(self._sim.drafting)
        self._sim.num_running -= 1
        self._done()

    def _record(self, drafts: _Drafts, num_tokens: int, began_s: float | None) -> None:
        now_s, can_draft = self._machine.now_s, drafts.sequence is not None
        is_drafted = drafts.timer.commit(num_tokens, began_s, now_s, self._times(), can_draft=can_draft)
        if self._rates is None:
            return
        if began_s is not None and is_drafted is not None:
            level = load_level(self._sim.num_running)
            self._rates.add(self._source if is_drafted else None, level, num_tokens, now_s - began_s)
        self._rates.add_tokens(num_tokens)
