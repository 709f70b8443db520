"""A verify core over any runner, and a sink that records what it says."""

import time

from opentelemetry.trace import INVALID_SPAN

from betoken.engine.sampler.verification import VerificationMode as Mode
from betoken.engine.sampling import SamplingParams
from betoken.rpc.fast_wake import FastWake
from betoken.rpc.link.commands import Close
from betoken.verify_worker.commands import Grant, Open, Rounds, Verify
from betoken.verify_worker.core import VerifyCore
from betoken.verify_worker.scheduler import Scheduler

EOS = 96
STEP = "step"


class RecordingSink:
    def __init__(self):
        self.decisions, self.stales, self.failures, self.load = [], [], {}, None
        self.pendings = []
        self.prompt_logprobs = {}
        """Positions and their logprobs as they came, by key."""

    def decided(self, decisions, load):
        self.decisions += decisions
        self.load = load()

    def send_prompt_logprobs(self, parts):
        for part in parts:
            told = self.prompt_logprobs.setdefault(part.key, [])
            told += enumerate(part.logprobs, part.first_position)

    def stale(self, key, length):
        self.stales.append((key, length))

    def pending(self, keys):
        self.pendings.append(keys)

    def failed(self, key, error):
        self.failures[key] = error

    def load_changed(self, load):
        self.load = load


class Bench:
    """A core with its fake model and sink."""

    def __init__(
        self,
        runner,
        max_rows=32,
        max_prefill_tokens=8,
        max_sequences=16,
        idle_grace_s=0.0,
        step_costs=(),
        attached=None,
    ):
        self.runner = runner
        self.log = []
        """Commands in the order they were applied, and `STEP` for each step."""
        self.sink = RecordingSink()
        self.scheduler = Scheduler(runner.page_table, max_rows, max_prefill_tokens, idle_grace_s)
        self.fast_wake = FastWake()
        self.core = VerifyCore(runner, self.scheduler, self.sink, max_sequences, step_costs, self.fast_wake, attached)

    def open(
        self,
        sequence_id,
        prompt_ids,
        output_ids=(),
        max_length=200,
        deadline_s=None,
        mode=Mode.COUPLED,
        span=INVALID_SPAN,
        drafter="",
        drafter_settings=(),
        grammar=None,
        num_prompt_logprobs=None,
        num_sent=0,
        **params,
    ):
        params = {"temperature": 0.0, "eos_token_ids": (EOS,), "ignore_eos": True} | params
        self.apply(
            Open(
                key=(1, sequence_id),
                params=SamplingParams(**params),
                prompt_ids=tuple(prompt_ids),
                output_ids=tuple(output_ids),
                max_length=max_length,
                opened_ns=time.perf_counter_ns(),
                mode=mode,
                grammar=grammar,
                drafter=drafter,
                drafter_settings=dict(drafter_settings),
                num_prompt_logprobs=num_prompt_logprobs,
                num_sent=num_sent,
                span=span,
                deadline_s=deadline_s,
            )
        )

    def block(self, sequence_id, base_length, draft_ids, num_plain_steps=0, **fields):
        """As the handler has it: without draft ids, a grant."""
        if not draft_ids:
            return self.grant(sequence_id, base_length, num_plain_steps)
        arrived_ns, key = time.perf_counter_ns(), (1, sequence_id)
        return self.apply(
            Verify(key, base_length, tuple(draft_ids), arrived_ns, num_plain_steps=num_plain_steps, **fields)
        )

    def grant(self, sequence_id, base_length, num_tokens, num_draft_tokens=0, is_priced=False, drafter=""):
        rounds, arrived_ns = Rounds(num_draft_tokens, is_priced), time.perf_counter_ns()
        self.apply(Grant((1, sequence_id), base_length, max(1, num_tokens), arrived_ns, rounds, drafter))

    def close(self, sequence_id):
        self.apply(Close((1, sequence_id)))

    def apply(self, command):
        self.log.append(command)
        self.core.apply(command)

    def step(self):
        self.log.append(STEP)
        self.core.step()

    def run(self):
        for _ in range(1000):
            if not self.core.has_work:
                return
            self.step()
            self.check_integrity()
        raise AssertionError("the core never came to rest")

    def check_integrity(self):
        """Whether pages are accounted for, and hold the KV of those they belong to."""
        self.core.check_integrity()
        for seq in self.core._sequences.values():
            if hasattr(self.runner, "held_ids"):
                assert self.runner.held_ids(seq.page_ids, seq.kv_length) == seq.ids[: seq.kv_length]

    def emitted(self, sequence_id, drafts):
        """Ids decided for a sequence, given the draft block of each decision by base length."""
        ids = []
        for decision in self.sink.decisions:
            if decision.key == (1, sequence_id):
                draft_ids = drafts.get(decision.base_length, [])
                if decision.attached is not None:
                    ids += [*decision.attached.accepted_ids, decision.next_id]
                    continue
                path = range(decision.num_accepted) if decision.path is None else decision.path
                ids += [*(draft_ids[node] for node in path), decision.next_id]
        return ids
