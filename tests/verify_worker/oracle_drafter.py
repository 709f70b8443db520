"""A drafter that knows what the target will say, attached to a core with a fake model."""

from betoken.drafters.drafter import Drafted
from betoken.verify_worker.attached import AttachedDrafters
from tests.verify_worker.harness import Bench

VOCAB_SIZE = 97


PROMPT = [1, 2, 3]


class OracleDrafter:
    """Proposes what the target will say, and `wrong` after it; fails in the ways a test asks for."""

    def __init__(self, truth, fault=None, num_late=0):
        self.truth, self.fault, self.num_late = truth, fault, num_late
        self.requests, self.num_opened, self.num_closed = {}, 0, 0

    @property
    def has_work(self):
        return bool(self.requests)

    def open(self, sequence):
        self.num_opened += 1

    def commit(self, sequence, ids):
        assert sequence.ids[-len(ids) :] == ids

    def request(self, sequence, num_tokens):
        self.requests[sequence] = num_tokens

    def close(self, sequence):
        self.num_closed += 1
        self.requests.pop(sequence, None)

    def step(self):
        if self.fault is not None:
            raise self.fault
        if self.num_late > 0:
            self.num_late -= 1
            return []
        requests, self.requests = self.requests, {}
        return [Drafted(seq, self.truth[len(seq.output_ids) :][:num]) for seq, num in requests.items()]

    def check_integrity(self):
        pass


def bench_with(runner, drafter, **options):
    attached = AttachedDrafters({"it": drafter}, VOCAB_SIZE, max_draft_tokens=8)
    return Bench(runner, attached=attached, **options)
