"""Window and pool equal a slow literal reference, written from the paper's definition, on a tiny random model.

The reference runs every row of every step by itself: a whole forward over the prompt, the output and the row's own
path, as a chain, without KV of anything before, and without a tree. Algorithm 2 of arXiv:2402.02057; how a window
follows commits that are not one per step is ours.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from betoken.draft_worker.commands import Commit, Open
from betoken.draft_worker.core import DraftCore
from betoken.drafters.lookahead.drafter import LookaheadDrafter
from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.rpc.link.commands import CloseLink
from tests.draft_worker.harness import RecordingSink, request
from tests.engine.tiny import save_tiny

MAX_ROWS = 96
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_new_tokens": 4},
}


class Reference:
    """One sequence, step by step, as the definition reads."""

    def __init__(self, runner, params, prompt_ids, window, ngram_size, guesses, is_seeded):
        self.runner, self.params = runner, params
        self.prompt_ids, self.output_ids = list(prompt_ids), []
        self.window, self.ngram_size, self.max_guesses, self.is_seeded = window, ngram_size, guesses, is_seeded
        self.random = random.Random(params.seed)
        self.trajectories = []  # number i has its first token i positions after the last committed one
        self.pool = []  # n-grams in the order of their last use
        self.num_committed_since_step = 0
        if is_seeded:
            for end in range(ngram_size, len(prompt_ids) + 1):
                self.use(prompt_ids[end - ngram_size : end])

    def drawn(self):
        """N - 1 tokens of the prompt, and how often a model has replaced one of them."""
        return [self.random.choice(self.prompt_ids) for _ in range(self.ngram_size - 1)], 0

    def model_says(self, path):
        """The model's own token after everything committed and `path`, at that position, with that position's noise."""
        ids = self.prompt_ids + self.output_ids + path
        page_ids, _ = self.runner.page_table.allocate(ids)
        logits = self.runner.forward([Segment(page_ids, 0, ids, 1)]).logits
        self.runner.page_table.release(page_ids)
        group = SampleGroup(self.params, self.prompt_ids, self.output_ids + path, ())
        return choose_tokens(logits, [group]).token_ids[0]

    def step(self):
        last = (self.prompt_ids + self.output_ids)[-1]
        self.trajectories[0] = ([last, *self.trajectories[0][0][1:]], self.trajectories[0][1])
        firsts = [tokens[0] for tokens, _ in self.trajectories]
        # The row of the last token of trajectory i sees the first tokens of trajectories 1 to i, then its own.
        new = [self.model_says(firsts[1 : i + 1] + tokens[1:]) for i, (tokens, _) in enumerate(self.trajectories)]
        own = self.trajectories[0][0]
        answers = [self.model_says(own[1 : level + 1]) for level in range(self.ngram_size - 2)]
        for (tokens, num_replaced), token in reversed(list(zip(self.trajectories, new, strict=True))):
            if num_replaced >= self.ngram_size - 2:
                self.use([*tokens, token])
        moved = [
            ([*tokens[1:], token], count + 1) for (tokens, count), token in zip(self.trajectories, new, strict=True)
        ]
        self.trajectories = [([last, *answers], self.ngram_size), *moved]

    def attach(self):
        """Before a step: exactly W trajectories, the first at the last committed token.

        What it has moved past goes to the far end, but the very first.
        """
        passed = self.trajectories[: self.num_committed_since_step]
        self.trajectories = self.trajectories[self.num_committed_since_step :] + passed[1:]
        self.num_committed_since_step = 0
        while len(self.trajectories) < self.window:
            self.trajectories.append(self.drawn())
        self.trajectories = self.trajectories[: self.window]

    def commit(self, ids):
        self.num_committed_since_step += len(ids)
        for token_id in ids:
            self.output_ids.append(token_id)
            text = self.prompt_ids + self.output_ids
            if self.is_seeded and len(text) >= self.ngram_size:
                self.use(text[-self.ngram_size :])

    def use(self, ngram):
        ngram = tuple(ngram)
        self.pool = [other for other in self.pool if other != ngram] + [ngram]
        of_key = [other for other in self.pool if other[0] == ngram[0]]
        if len(of_key) > self.max_guesses:
            self.pool.remove(of_key[0])

    def guesses(self):
        """All guesses at what follows, as paths, the most recently used first."""
        last = (self.prompt_ids + self.output_ids)[-1]
        return [list(ngram[1:]) for ngram in reversed(self.pool) if ngram[0] == last]


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    directory = save_tiny(tmp_path_factory.mktemp("tiny"), "llama", seed=3)
    options = {"dtype": "float32", "num_pages": 96, "compile": "off", "self_check": False, "num_threads": 1}
    return load_runner(EngineConfig(directory, **options))


def tree_paths(drafted):
    """The set of all root paths of a block, each as a tuple."""
    parents = drafted.parents or range(-1, len(drafted.draft_ids) - 1)
    paths = []
    for token_id, parent in zip(drafted.draft_ids, parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token_id))
    return paths


def merged(guesses, num_nodes):
    """All prefixes of the guesses, in order, each once."""
    prefixes = [tuple(guess[: end + 1]) for guess in guesses for end in range(len(guess))]
    return list(dict.fromkeys(prefixes))[:num_nodes]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(
        st.tuples(st.integers(2, 6), st.integers(2, 5), st.integers(1, 4), st.booleans()), min_size=1, max_size=3
    ),
    sampling=st.sampled_from(sorted(SAMPLINGS)),
    seed=st.integers(0, 2**32),
    rounds=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7)), min_size=2, max_size=5),
)
def test_lookahead_drafts_equal_the_literal_reference(runner, shapes, sampling, seed, rounds):
    """Random windows share a batch; numbers of steps are random, and commits follow the model or do not."""
    rng = random.Random(seed)
    sink = RecordingSink()
    drafter = LookaheadDrafter(runner, MAX_ROWS, 8)
    core = DraftCore({"lookahead": drafter}, [runner.page_table], sink, 8)
    references = {}
    for n, (window, ngram_size, guesses, is_seeded) in enumerate(shapes):
        prompt_ids = [rng.randrange(101) for _ in range(rng.randrange(1, 25))]
        params = SamplingParams(seed=seed + n, eos_token_ids=(0,), **SAMPLINGS[sampling])
        given = {"window": window, "ngram_size": ngram_size, "guesses": guesses, "seed_from_prompt": int(is_seeded)}
        settings = {k: str(v) for k, v in given.items()}
        core.apply(Open((1, n), params, prompt_ids, (), 600, settings=settings))
        references[n] = Reference(runner, params, prompt_ids, window, ngram_size, guesses, is_seeded)
    try:
        for num_steps, num_committed in rounds:
            sink.answers.clear()
            for state in drafter._states.values():
                state.settings = replace(state.settings, steps=max(1, num_steps))
            num_nodes = rng.randrange(1, 20)
            asked = [n for n in references if num_steps or rng.random() < 0.5]
            for n in asked:
                core.apply(request(core, n, num_nodes, 0, takes_trees=True))
            while core.has_work:
                core.step()
                core.check_integrity()
            drafted = {answer.key[1]: answer.drafted for answer in sink.answers}
            for n, reference in references.items():
                if n in asked:
                    assert tree_paths(drafted[n]) == merged(reference.guesses(), num_nodes)
                    for _ in range(max(1, num_steps)):
                        reference.attach()
                        reference.step()
                ids = _commit(rng, reference, num_committed)
                if ids:
                    core.apply(Commit((1, n), len(reference.prompt_ids) + len(reference.output_ids), ids))
                    reference.commit(ids)
    finally:
        core.apply(CloseLink(1))  # the runner is shared between examples
    assert not sink.failures
    assert runner.page_table.num_free == runner.page_table.num_pages


def _commit(rng, reference, num_tokens):
    """Ids as the model itself would go on, or any others."""
    ids = []
    for _ in range(num_tokens):
        ids.append(reference.model_says(ids) if rng.random() < 0.6 else rng.randrange(101))
    return ids
