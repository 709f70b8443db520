"""The verify worker of the simulator: forwards over all sequences that are ready, priced by the project's own code."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from betoken.bench.economy.machine import Machine
from betoken.bench.economy.recorded import Costs, Text
from betoken.common.economy.row_price import RowPrice
from betoken.verify_worker.scheduler import prefill_rows

_PAGE = 16
_LEAST_PREFILL_ROWS, _MOST_PREFILL_ROWS = 16, 128


@dataclass(frozen=True, slots=True)
class Load:
    """A worker's report of itself with its verification results, rounded as on the wire."""

    running: int
    tokens_per_s: float
    row_price: float
    step_time_ratio: float


@dataclass(slots=True)
class OpenSequence:
    """An open sequence."""

    text: Text
    decided: Callable[[list[int], int], None]
    """Hears of the ids that a verification result brings, and of the draft tokens among them."""
    num_missing: int
    """Rows of the prompt without KV; what pages hold is cached."""
    num_output: int = 0
    plain_until: int = 0
    """Output tokens up to which it decodes alone."""
    draft: tuple[Sequence[int], Sequence[int] | None] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the next forward has a use for it."""
        return self.num_output < len(self.text.answer_ids) and (
            self.draft is not None or self.plain_until > self.num_output
        )


@dataclass(slots=True)
class VerifyService:
    """A verify worker: one forward after another."""

    machine: Machine
    costs: Costs
    send: Callable[[list[Callable[[], None]], Load], None]
    """Takes the verification results of a forward to the router."""
    num_forwards: int = 0
    held_up_s: float = 0.0
    """Seconds by which the next forward over drafts takes longer, once: a fault of the machine."""
    price: RowPrice = field(init=False)
    _prefill_rows: int = field(init=False)
    _sequences: list[OpenSequence] = field(default_factory=list)
    _is_busy: bool = False

    def __post_init__(self) -> None:
        step_costs = self.costs.verify.step_costs()
        self.price = RowPrice(step_costs)
        self._prefill_rows = prefill_rows(step_costs, _LEAST_PREFILL_ROWS, _MOST_PREFILL_ROWS)

    def open(self, text: Text, decided: Callable[[list[int], int], None]) -> OpenSequence:
        """Take a sequence in."""
        if not self._sequences:
            self.price.resume(self.machine.now_s)
        sequence = OpenSequence(text, decided, 1 + (len(text.prompt_ids) - 1) % _PAGE)
        self._sequences.append(sequence)
        return sequence

    def close(self, sequence: OpenSequence) -> None:
        """Forget a sequence."""
        self._sequences.remove(sequence)

    def verify(self, sequence: OpenSequence, draft_ids: Sequence[int], parents: Sequence[int] | None) -> None:
        """A draft block arrives."""
        sequence.draft = (draft_ids, parents)
        self._go_on()

    def grant(self, sequence: OpenSequence, plain_until: int) -> None:
        """A grant of plain steps arrives."""
        sequence.plain_until = max(sequence.plain_until, plain_until)
        self._go_on()

    def _go_on(self) -> None:
        if self._is_busy:
            return
        planned = [sequence for sequence in self._sequences if sequence.is_ready]
        if not planned:
            return
        decoding = [sequence for sequence in planned if not sequence.num_missing]
        rows_left = self._prefill_rows if decoding else _MOST_PREFILL_ROWS
        num_rows = has_prefill = 0
        taking: list[OpenSequence] = []
        for sequence in planned:
            prefill = min(rows_left, sequence.num_missing)
            rows_left -= prefill
            has_prefill |= prefill > 0
            sequence.num_missing -= prefill
            num_rows += prefill
            if not sequence.num_missing:
                taking.append(sequence)
                num_rows += 1 + (len(sequence.draft[0]) if sequence.draft is not None else 0)
        seconds = self.costs.verify.seconds(len(planned), num_rows)
        started_s, held_up_s = self.machine.now_s, 0.0
        if any(sequence.draft is not None for sequence in taking):
            held_up_s, self.held_up_s = self.held_up_s, 0.0
        self._is_busy = True
        self.num_forwards += 1

        def after_forward() -> None:
            if taking and not has_prefill:
                self.price.add_forward(num_rows, len(planned), round((self.machine.now_s - started_s) * 1e9))
            own_s = self.costs.worker_step_s + self.costs.router_entry_s / 2 * len(taking)
            self.machine.work(own_s, 1, lambda: self._hand_out(taking))

        self.machine.work(seconds, self.costs.verify_threads, lambda: self.machine.after(held_up_s, after_forward))

    def _hand_out(self, taking: list[OpenSequence]) -> None:
        self._is_busy = False
        results: list[Callable[[], None]] = []
        num_tokens = 0
        for sequence in taking:
            ids, num_accepted = _decide(sequence)
            sequence.num_output += len(ids)
            sequence.draft = None
            num_tokens += len(ids)
            results.append(partial(sequence.decided, ids, num_accepted))
        self.price.add_tokens(num_tokens, self.machine.now_s)
        load = Load(
            len(self._sequences),
            float(f"{self.price.tokens_per_s:.1e}"),
            round(self.price.price, 2),
            self.price.step_time_ratio,
        )
        self.send(results, load)
        self._go_on()


def _decide(sequence: OpenSequence) -> tuple[list[int], int]:
    """Ids that a forward brings: the accepted ones of the draft and the target's own."""
    left = sequence.text.answer_ids[sequence.num_output :]
    num_accepted = 0
    if sequence.draft is not None:
        draft_ids, parents = sequence.draft
        places = zip(parents if parents is not None else range(-1, len(draft_ids) - 1), draft_ids, strict=True)
        children = {place: node for node, place in reversed(list(enumerate(places)))}
        node = -1
        while num_accepted < len(left) and (found := children.get((node, left[num_accepted]))) is not None:
            node, num_accepted = found, num_accepted + 1
    ids = left[: num_accepted + 1]
    return ids, min(num_accepted, len(ids))
