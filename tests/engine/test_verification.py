"""verify_blocks: three modes in one batch, each sequence by itself; rejection keeps the distribution under rules."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampler.draft_probs import sample_drafts
from betoken.engine.sampler.verification import BlockGroup, TypicalBounds, VerificationMode, verify_blocks
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.kernels.sample import token_logprobs

PARAMS = SamplingParams(temperature=0.9, top_k=30, min_new_tokens=4, eos_token_ids=(1,), presence_penalty=0.4, seed=3)
MODES = list(VerificationMode)


def random_logits(num_rows: int, vocab_size: int = 60) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(num_rows)) * 1.5


def random_groups(logits: torch.Tensor, num_groups: int) -> list[BlockGroup]:
    """Chains of 0 to 3 drafts of the rows' likelier ids, modes in turn, some with logprobs."""
    rng = np.random.default_rng(0)
    groups, row = [], 0
    for i in range(num_groups):
        draft_ids = [int(logits[row + j].topk(4).indices[rng.integers(4)]) for j in range(i % 4)]
        probs = [SparseProbs([draft_id, (draft_id + 1) % 60], [0.5, 0.5]) for draft_id in draft_ids]
        params = dataclasses.replace(PARAMS, seed=i, num_logprobs=(None, 2)[i % 2])
        mode = MODES[i % 3]
        is_sparse = mode is VerificationMode.REJECTION and i % 5 > 1
        groups.append(BlockGroup(SampleGroup(params, [5, i], [7], draft_ids), mode, probs if is_sparse else ()))
        row += len(draft_ids) + 1
    return groups


def test_verification_of_a_sequence_does_not_depend_on_others_or_their_modes() -> None:
    logits = random_logits(100)
    groups = random_groups(logits, 40)
    together = verify_blocks(logits, groups)
    assert {verified.num_accepted for verified in together} == {0, 1, 2, 3}
    row = 0
    for group, verified in zip(groups, together, strict=True):
        end = row + group.rows.num_rows
        assert verify_blocks(logits[row:end], [group]) == [verified]
        row = end


def test_emitted_ids_are_the_accepted_drafts_and_one_more_with_their_own_logprobs() -> None:
    logits = random_logits(100)
    groups = random_groups(logits, 40)
    row = 0
    for group, verified in zip(groups, verify_blocks(logits, groups), strict=True):
        num_emitted = verified.num_accepted + 1
        assert verified.emitted_ids[:-1] == list(group.rows.draft_ids[: verified.num_accepted])
        assert len(verified.emitted_ids) == num_emitted
        if group.rows.params.num_logprobs is None:
            assert verified.logprobs == []
        else:
            expected, _, _ = token_logprobs(logits[row : row + num_emitted], torch.tensor(verified.emitted_ids), 0)
            assert [logprob.logprob for logprob in verified.logprobs] == expected.tolist()
        row += group.rows.num_rows


def test_coupled_emits_the_target_s_own_tokens_and_greedy_does_in_every_mode() -> None:
    logits = random_logits(100)
    for mode, temperature in [(VerificationMode.COUPLED, 0.9), *((mode, 0.0) for mode in MODES)]:
        groups = random_groups(logits, 40)
        for group in groups:
            group.mode, group.draft_probs = mode, ()
            group.rows.params = dataclasses.replace(group.rows.params, temperature=temperature)
        own_ids = choose_tokens(logits, [group.rows for group in groups]).token_ids
        row = 0
        for group, verified in zip(groups, verify_blocks(logits, groups), strict=True):
            assert verified.emitted_ids == own_ids[row : row + verified.num_accepted + 1]
            row += group.rows.num_rows


@pytest.mark.parametrize("has_probs", [True, False], ids=["sparse", "certain"])
def test_rejection_keeps_the_distribution_of_every_token_of_a_block(has_probs: bool) -> None:
    """The draft model is sampled under the same rules; the second token is judged if the first one was accepted."""
    num_sequences, num_ids = 4000, 80
    tables = torch.randn(2, num_ids + 1, num_ids, generator=torch.Generator().manual_seed(4)) * 1.5
    tables[1] += 0.5 * tables[0]  # [model, previous id, id]: target and draft, nothing alike but related
    start = num_ids
    params = [dataclasses.replace(PARAMS, top_k=0, seed=seed, temperature=0.7) for seed in range(num_sequences)]
    previous, drafts, distributions = [start] * num_sequences, [[] for _ in params], [[] for _ in params]
    for _ in range(2):
        groups = [SampleGroup(p, [2], ids, []) for p, ids in zip(params, drafts, strict=True)]
        for i, (draft_id, sparse) in enumerate(sample_drafts(tables[1][previous], groups)):
            drafts[i].append(draft_id)
            distributions[i].append(sparse)
        previous = [ids[-1] for ids in drafts]
    rows = [row for ids in drafts for row in (start, *ids)]
    blocks = [
        BlockGroup(SampleGroup(p, [2], [], ids), VerificationMode.REJECTION, probs if has_probs else ())
        for p, ids, probs in zip(params, drafts, distributions, strict=True)
    ]
    verified = verify_blocks(tables[0][rows], blocks)
    assert_distributed(Counter(v.emitted_ids[0] for v in verified), tables[0][start], [])
    common = Counter(v.emitted_ids[0] for v in verified if v.num_accepted).most_common(1)[0][0]
    seconds = Counter(v.emitted_ids[1] for v in verified if v.num_accepted and v.emitted_ids[0] == common)
    assert seconds.total() > 100
    assert_distributed(seconds, tables[0][common], [common])


def assert_distributed(counts: Counter, logits: torch.Tensor, output_ids: list[int]) -> None:
    """Chi-square against softmax of the logits with the presence penalty, EOS masked; rare ids in one class."""
    scores = logits.double().numpy().copy()
    scores[output_ids] -= PARAMS.presence_penalty
    scores[1] = -np.inf
    expected = np.exp(scores / 0.7)
    expected *= counts.total() / expected.sum()
    observed = np.array([counts[i] for i in range(len(expected))])
    assert observed[1] == 0
    is_common = expected >= 5
    pairs = [np.append(x[is_common], x[~is_common].sum()) for x in (observed, expected)]
    assert stats.chisquare(*pairs).pvalue > 1e-4


def test_logits_rows_that_do_not_match_the_drafts_are_rejected() -> None:
    with pytest.raises(ValueError, match="rows"):
        verify_blocks(random_logits(3), [BlockGroup(SampleGroup(PARAMS, [1], [], [2]))])


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_typical_takes_the_longest_path_of_a_tree_whose_tokens_are_likely_enough(temperature: float) -> None:
    """Every path from the root is judged as a separate chain; bounds are the sequence's, and trees share a batch."""
    rng = np.random.default_rng(4)
    groups, expected, row = [], [], 0
    logits = random_logits(400)
    for index in range(30):
        parents = [int(rng.integers(-1, node)) if node else -1 for node in range(int(rng.integers(0, 9)))]
        rows_of = [row, *(row + 1 + node for node in range(len(parents)))]
        draft_ids = [int(logits[rows_of[parent + 1]].topk(4).indices[rng.integers(4)]) for parent in parents]
        bounds = (TypicalBounds(0.09, 0.3), TypicalBounds(0.3, 0.9), TypicalBounds(0.0, 0.0))[index % 3]
        params = dataclasses.replace(PARAMS, seed=index, temperature=temperature, presence_penalty=0.0)
        tree = SampleGroup(params, [5, index], [7], draft_ids, parents=parents)
        groups.append(BlockGroup(tree, VerificationMode.TYPICAL, bounds=bounds))
        paths = []
        for leaf in range(-1, len(parents)):
            path: list[int] = []
            while leaf >= 0:
                path.insert(0, leaf)
                leaf = parents[leaf]
            chain = SampleGroup(params, [5, index], [7], [draft_ids[node] for node in path])
            chain_rows = logits[[row, *(row + 1 + node for node in path)]].contiguous()
            (verified,) = verify_blocks(chain_rows, [BlockGroup(chain, VerificationMode.TYPICAL, bounds=bounds)])
            paths.append((verified.num_accepted, path[: verified.num_accepted], verified.emitted_ids))
        expected.append(paths)
        row += 1 + len(parents)
    together = verify_blocks(logits[:row].contiguous(), groups)
    for group, verified, paths in zip(groups, together, expected, strict=True):
        assert verified.num_accepted == max(length for length, _, _ in paths)
        found = (verified.num_accepted, verified.path, verified.emitted_ids)
        assert found in paths, group
    assert len({verified.num_accepted for verified in together}) > 2
    assert any(verified.path != list(range(verified.num_accepted)) for verified in together)
