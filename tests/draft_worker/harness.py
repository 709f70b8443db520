"""A draft core over any runner, and a sink that records what it says."""

import time

from opentelemetry.trace import INVALID_SPAN

from betoken.draft_worker.commands import Open, RequestDraft
from betoken.draft_worker.core import DraftCore
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.drafter import NgramDrafter
from betoken.drafters.shared_pages import SharedPages
from betoken.engine.sampling import SamplingParams
from betoken.rpc.fast_wake import FastWake

RULED = {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "logit_bias": ((5, 1.5),), "min_new_tokens": 9}
PARAMS = {
    1: SamplingParams(temperature=0.0, eos_token_ids=(0,)),
    2: SamplingParams(temperature=0.9, seed=3, top_p=0.9, eos_token_ids=(0, 1), **RULED),
    3: SamplingParams(temperature=1.2, seed=4, top_k=3, ignore_eos=True),
}


def request(core, sequence_id, num_tokens, *fields, **named):
    """Request for a draft after all committed ids; an unknown sequence has none."""
    entry = core._sequences.get((1, sequence_id))
    return RequestDraft((1, sequence_id), *(entry.tip if entry else (1, 0)), num_tokens, *fields, **named)


class RecordingSink:
    def __init__(self):
        self.answers, self.failures, self.load, self.pendings = [], {}, None, []

    def drafted(self, answers, load):
        self.answers += answers
        self.load = load()

    def pending(self, keys):
        self.pendings.append(keys)

    def failed(self, key, error):
        self.failures[key] = error

    def load_changed(self, load):
        self.load = load


class Bench:
    def __init__(self, runner, max_sequences=8, idle_grace_s=0.0):
        self.fast_wake = FastWake()
        self.runner = runner
        self.pages = SharedPages(runner.page_table, idle_grace_s)
        self.sink = RecordingSink()
        self.core = DraftCore(self.drafters(), [runner.page_table], self.sink, max_sequences, self.fast_wake)

    def drafters(self):
        model = ModelDrafter(self.runner, max_rows=16, max_prefill_tokens=6, pages=self.pages)
        return {"model": model, "ngram": NgramDrafter()}

    def open(
        self,
        sequence_id,
        prompt_ids,
        drafter="model",
        output_ids=(),
        max_length=200,
        deadline_s=None,
        wants_probs=False,
        draft_affects_output=False,
        seed=None,
        temperature=0.0,
        span=INVALID_SPAN,
        **settings,
    ):
        params = SamplingParams(temperature=temperature, eos_token_ids=(96,), ignore_eos=True, seed=seed or sequence_id)
        opening = Open(
            key=(1, sequence_id),
            params=params,
            prompt_ids=tuple(prompt_ids),
            output_ids=tuple(output_ids),
            max_length=max_length,
            drafter=drafter,
            settings=settings,
            deadline_s=deadline_s,
            wants_probs=wants_probs,
            draft_affects_output=draft_affects_output,
            span=span,
        )
        self.core.apply(opening)

    def draft(self, *sequence_ids, num_tokens=4):
        """Draft blocks by sequence id, all asked for at once."""
        self.sink.answers.clear()
        for sequence_id in sequence_ids:
            self.core.apply(request(self.core, sequence_id, num_tokens, time.perf_counter_ns()))
        for _ in range(200):
            if not self.core.has_work:
                break
            self.core.step()
            self.core.check_integrity()
            for kv in getattr(self.core.host._drafters.get("model"), "_caches", {}).values():
                assert self.runner.held_ids(kv.page_ids, len(kv.kv_ids)) == kv.kv_ids
        return {answer.key[1]: answer.drafted.draft_ids for answer in self.sink.answers}
