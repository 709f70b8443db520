"""Random trees and chains, compared with decoding without speculation, with any runner."""

from betoken.rpc.link.commands import Close
from tests.verify_worker.harness import Bench


def random_tree(rng, truth, num_nodes, vocab_size):
    """Ids and parents of a tree in which some path may follow the truth; siblings may be equal."""
    ids, parents, depths = [], [], []
    for node in range(num_nodes):
        parent = rng.randrange(max(-1, node - 5), node)
        depth = depths[parent] + 1 if parent >= 0 else 0
        is_right = depth < len(truth) and rng.random() < 0.6
        ids.append(truth[depth] if is_right else rng.randrange(vocab_size))
        parents.append(parent)
        depths.append(depth)
    return ids, parents


class Speculating:
    """Opens sequences, verifies random trees and chains for them until each has `num_tokens`, with `bench`."""

    def __init__(self, bench, rng, truths, vocab_size):
        self.bench, self.rng, self.truths, self.vocab_size = bench, rng, truths, vocab_size
        self.outputs = {n: [] for n in truths}
        self.longest_path = 0

    def round(self, prompts, unfinished):
        blocks = {}
        for n in unfinished:
            base, rest = len(prompts[n]) + len(self.outputs[n]), self.truths[n][len(self.outputs[n]) :]
            ids, parents = random_tree(self.rng, rest, self.rng.randrange(1, 12), self.vocab_size)
            if self.rng.random() < 0.2:
                parents = []
            if self.rng.random() < 0.2:
                self.bench.block(n, base + 1, ids, parents=parents)  # stale
            num_plain_steps = self.rng.choice([0, 0, 2])
            self.bench.block(n, base, ids, num_plain_steps, parents=parents)
            blocks[n, base] = ids
        seen = len(self.bench.sink.decisions)
        self.bench.run()
        for decision in self.bench.sink.decisions[seen:]:
            n = decision.key[1]
            ids = blocks.get((n, decision.base_length), [])
            path = range(decision.num_accepted) if decision.path is None else decision.path
            self.longest_path = max(self.longest_path, len(path))
            assert decision.base_length == len(prompts[n]) + len(self.outputs[n])
            self.outputs[n] += [*(ids[node] for node in path), decision.next_id]

    def run(self, prompts, num_tokens):
        while unfinished := [n for n in prompts if len(self.outputs[n]) < num_tokens]:
            self.round(prompts, unfinished)
        for n in prompts:
            assert self.outputs[n][:num_tokens] == self.truths[n][:num_tokens]


def free_everything(bench, sequence_ids):
    for n in sequence_ids:
        bench.core.apply(Close((1, n)))
    bench.core.check_integrity()
    assert bench.sink.load.num_free_pages == bench.sink.load.num_pages


def decode_plainly(runner, prompts, num_tokens, params):
    bench = Bench(runner)
    for n, prompt in prompts.items():
        bench.open(n, prompt, **params[n])
        bench.block(n, len(prompt), [], num_tokens)
    bench.run()
    logprobs = {n: [d.logprobs[0] for d in bench.sink.decisions if d.key == (1, n) and d.logprobs] for n in prompts}
    outputs = {n: bench.emitted(n, {}) for n in prompts}
    free_everything(bench, prompts)
    return outputs, logprobs
