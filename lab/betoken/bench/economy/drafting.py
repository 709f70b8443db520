"""The draft worker of the simulator: the project's own drafters, with a replacement for the draft model.

Each request is answered after the time that the recorded costs give it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from betoken.bench.economy.machine import Machine
from betoken.bench.economy.recorded import Costs, Text
from betoken.common.economy.terms import DraftTerms
from betoken.drafters.drafter import Drafted, Drafter, DraftSequence
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.engine.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


class ModelStandIn:
    """Drafts chains as the recorded draft model would; counts the rows that its forwards take."""

    def __init__(self) -> None:
        self.texts: dict[tuple[int, int], Text] = {}
        self._num_written: dict[DraftSequence, int] = {}
        self._wanted: dict[DraftSequence, list[int]] = {}
        self._num_tokens: dict[DraftSequence, int] = {}
        self.caches_prompts = True
        self.num_rows: list[int] = []
        """Rows of each sequence in the last forward."""

    @property
    def has_work(self) -> bool:
        return bool(self._wanted)

    def open(self, sequence: DraftSequence) -> None:
        self._num_written[sequence] = len(sequence.prompt_ids) // 16 * 16 if self.caches_prompts else 0

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        pass

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        self._wanted[sequence], self._num_tokens[sequence] = [], num_tokens

    def close(self, sequence: DraftSequence) -> None:
        self._wanted.pop(sequence, None)
        self._num_written.pop(sequence, None)

    def step(self) -> list[Drafted]:
        """One forward over every sequence that waits: a token of each."""
        self.num_rows, finished = [], []
        for sequence, draft in list(self._wanted.items()):
            length = len(sequence.ids) + len(draft)
            self.num_rows.append(max(1, length - self._num_written[sequence]))
            self._num_written[sequence] = length
            draft.append(self._says(sequence, length))
            if len(draft) == self._num_tokens[sequence]:
                del self._wanted[sequence]
                self._num_written[sequence] = len(sequence.ids)
                finished.append(Drafted(sequence, draft, sources=["model"], num_forwards=len(draft)))
        return finished

    def check_integrity(self) -> None:
        pass

    def _says(self, sequence: DraftSequence, position: int) -> int:
        text = self.texts[sequence.key]
        index = position - len(text.prompt_ids)
        if index >= len(text.answer_ids):
            return 0
        return text.answer_ids[index] if text.model_right[index] else text.answer_ids[index] ^ 1


@dataclass(slots=True)
class Request:
    """One request for a draft, and where its answer goes."""

    sequence: DraftSequence
    commits: list[int]
    num_tokens: int
    terms: DraftTerms | None
    answer: Callable[[Drafted, float], None]
    """Hears of the draft and of the seconds from the request's start to it."""
    started_s: float = 0.0


class DraftService:
    """A draft worker: takes what has arrived, lets its drafters step, answers."""

    def __init__(self, machine: Machine, costs: Costs, drafters: Sequence[str]) -> None:
        """`drafters`: the drafters of requests: `model`, `ngram` and `fused`."""
        self._machine, self._costs = machine, costs
        self.model, self._ngram = ModelStandIn(), NgramDrafter()
        names: dict[str, Drafter] = {"ngram": self._ngram}
        if costs.draft is not None:
            names = {"model": self.model, **names}
        if "fused" in drafters:
            names["fused"] = FusedDrafter(dict(names), lambda: machine.now_ns)
        self._drafters = names
        self._hosts: dict[DraftSequence, Drafter] = {}
        self._inbox: list[Request] = []
        self._waiting: dict[DraftSequence, Request] = {}
        self._is_busy = False

    @property
    def names(self) -> list[str]:
        """Names of the drafters."""
        return list(self._drafters)

    def open(self, drafter: str, key: tuple[int, int], text: Text, num_output: int) -> DraftSequence:
        """Open a sequence at a drafter, with so many tokens of its answer."""
        self.model.texts[key] = text
        sequence = DraftSequence(
            key, GREEDY, text.prompt_ids, text.answer_ids[:num_output], len(text.prompt_ids) + len(text.answer_ids) + 64
        )
        sequence.takes_trees = True
        self._hosts[sequence] = self._drafters[drafter]
        self._hosts[sequence].open(sequence)
        return sequence

    def close(self, sequence: DraftSequence) -> None:
        """Forget a sequence."""
        self._hosts.pop(sequence).close(sequence)
        self._waiting.pop(sequence, None)

    def request(self, request: Request) -> None:
        """A request arrives."""
        self._inbox.append(request)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_busy:
            return
        inbox, self._inbox = self._inbox, []
        seconds = 0.0
        for request in inbox:
            request.started_s = self._machine.now_s
            self._waiting[request.sequence] = request
            if request.commits:
                request.sequence.ids.extend(request.commits)
                request.sequence.output_ids.extend(request.commits)
                self._hosts[request.sequence].commit(request.sequence, request.commits)
            request.sequence.terms, request.sequence.is_waiting = request.terms, True
            self._hosts[request.sequence].request(request.sequence, request.num_tokens)
            seconds += self._costs.ngram_s
        if not inbox and not any(drafter.has_work for drafter in self._drafters.values()):
            return
        finished: list[Drafted] = []
        for drafter in self._drafters.values():
            if drafter.has_work:
                finished += drafter.step()
                seconds += self._step_s(drafter)
        self._is_busy = True
        self._machine.work(seconds, 1, lambda: self._hand_out(finished))

    def _step_s(self, drafter: Drafter) -> float:
        if drafter is self.model and self._costs.draft is not None:
            rows = self.model.num_rows
            return self._costs.worker_step_s + self._costs.draft.seconds(len(rows), sum(rows))
        return self._costs.ngram_s

    def _hand_out(self, finished: list[Drafted]) -> None:
        self._is_busy = False
        for drafted in finished:
            request = self._waiting_for(drafted)
            if request is not None:
                request.sequence.is_waiting = False
                request.answer(drafted, self._machine.now_s - request.started_s)
        self._go_on()

    def _waiting_for(self, drafted: Drafted) -> Request | None:
        """`fused` gives each source a separate view of a sequence, with the same key."""
        for sequence, request in list(self._waiting.items()):
            if sequence.key == drafted.sequence.key:
                del self._waiting[sequence]
                return request
        return None
