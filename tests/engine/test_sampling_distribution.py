"""Every sampling field against the exact distribution; the processing order against transformers' own processors."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from betoken.kernels import noise

LOGITS = np.array([1.5, -0.3, 0.8, 2.1, -1.0, 0.0, 1.1, 0.4])
PROMPT, OUTPUT, DRAFT = [0, 3, 3], [1, 6, 6], [3, 2]
NUM_BLOCKS = 4000
FIELDS = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5},
    {"top_k": 3},
    {"top_p": 0.75},
    {"min_p": 0.15},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.2},
    {"presence_penalty": -0.7},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -0.4},
    {"logit_bias": ((3, -2.0), (4, 1.7))},
    {"min_new_tokens": 4, "eos_token_ids": (3,), "stop_token_ids": (6, 7)},
    {"seed": 2**64 - 1 - NUM_BLOCKS},
    {
        "temperature": 0.8,
        "top_k": 6,
        "top_p": 0.93,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": ((2, 0.5),),
        "min_new_tokens": 5,
        "eos_token_ids": (3,),
    },
]


def exact_distribution(logits: np.ndarray, params: SamplingParams, path_ids: Sequence[int]) -> np.ndarray:
    """The design's processing, written once more in float64 on single ids."""
    scores = logits.copy()
    for token_id, bias in params.logit_bias:
        scores[token_id] += bias
    for token_id in {*PROMPT, *path_ids}:
        factor = params.repetition_penalty
        scores[token_id] = scores[token_id] * factor if scores[token_id] < 0 else scores[token_id] / factor
    for token_id in set(path_ids):
        scores[token_id] -= params.presence_penalty + params.frequency_penalty * list(path_ids).count(token_id)
    if len(path_ids) < params.min_new_tokens:
        scores[[*params.eos_token_ids, *params.stop_token_ids]] = -np.inf
    weights = np.exp(scores / params.temperature)
    order = np.argsort(-weights, kind="stable")
    if params.top_k:
        weights[weights < weights[order[params.top_k - 1]]] = 0
    weights /= weights.sum()
    above = np.cumsum(weights[order]) - weights[order]
    if params.top_p < 1:
        weights[order[above >= params.top_p]] = 0
    weights[weights < params.min_p * weights.max()] = 0
    return weights / weights.sum()


@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "-".join(fields) or "neutral")
def test_every_row_of_a_draft_has_the_exact_distribution(fields: dict) -> None:
    """Chi-square at each row of a drafted block: the row's own path decides its penalties and masks."""
    params = SamplingParams(**fields)
    groups = [
        SampleGroup(dataclasses.replace(params, seed=params.seed + i), PROMPT, OUTPUT, DRAFT) for i in range(NUM_BLOCKS)
    ]
    num_rows = len(DRAFT) + 1
    logits = torch.tensor(LOGITS, dtype=torch.float32).repeat(NUM_BLOCKS * num_rows, 1)
    token_ids = np.array(choose_tokens(logits, groups).token_ids).reshape(NUM_BLOCKS, num_rows)
    for row in range(num_rows):
        expected = exact_distribution(LOGITS, params, OUTPUT + DRAFT[:row])
        counts = np.bincount(token_ids[:, row], minlength=len(LOGITS))
        assert not counts[expected == 0].any()
        kept = expected > 0
        assert stats.chisquare(counts[kept], expected[kept] * NUM_BLOCKS).pvalue > 1e-4, row


def test_sampled_rows_of_a_draft_are_independent() -> None:
    """Positions have independent noise: the joint table of two rows factorises."""
    groups = [SampleGroup(SamplingParams(seed=i), PROMPT, OUTPUT, [0]) for i in range(NUM_BLOCKS)]
    logits = torch.tensor(LOGITS, dtype=torch.float32).repeat(NUM_BLOCKS * 2, 1)
    pairs = np.array(choose_tokens(logits, groups).token_ids).reshape(NUM_BLOCKS, 2)
    table = np.zeros((8, 8))
    np.add.at(table, (pairs[:, 0], pairs[:, 1]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def transformers_scores(
    logits: torch.Tensor, params: SamplingParams, prompt_ids: list[int], path_ids: list[int]
) -> torch.Tensor:
    """[V] what transformers' own processors leave, divided by the temperature, in the order generate() applies them."""
    processors = LogitsProcessorList()
    if params.logit_bias:
        processors.append(SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in params.logit_bias}))
    processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    endings = [*params.eos_token_ids, *params.stop_token_ids]
    if params.min_new_tokens and endings:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt_ids), params.min_new_tokens, endings))
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([prompt_ids + path_ids]), logits.unsqueeze(0).clone())[0]


def random_params(rng: np.random.Generator, vocab_size: int) -> SamplingParams:
    def maybe(value: float, neutral: float) -> float:
        return value if rng.random() < 0.6 else neutral

    ids = rng.permutation(vocab_size)[:5].tolist()
    return SamplingParams(
        temperature=float(rng.uniform(0.3, 2.0)),
        top_k=int(maybe(int(rng.integers(1, vocab_size)), 0)),
        top_p=maybe(float(rng.uniform(0.3, 0.99)), 1.0),
        min_p=maybe(float(rng.uniform(0.001, 0.3)), 0.0),
        repetition_penalty=maybe(float(rng.uniform(0.5, 2.0)), 1.0),
        logit_bias=tuple((token_id, float(rng.normal())) for token_id in ids[: int(maybe(3, 0))]),
        seed=int(rng.integers(0, 2**63)),
        min_new_tokens=int(maybe(int(rng.integers(0, 8)), 0)),
        eos_token_ids=(ids[3],),
        stop_token_ids=(ids[4],),
    )


@pytest.mark.parametrize("vocab_size", [16, 1000])
def test_the_order_of_logits_processors_is_that_of_transformers(vocab_size: int) -> None:
    """Same survivors, and the same token under the same noise, at every row of random blocks."""
    rng = np.random.default_rng(vocab_size)
    for _ in range(60):
        params = random_params(rng, vocab_size)
        prompt_ids, output_ids, draft_ids = (rng.integers(0, vocab_size, n).tolist() for n in (6, 3, 4))
        logits = torch.from_numpy(rng.normal(size=(5, vocab_size)) * 4).to(torch.float32)
        chosen = choose_tokens(logits, [SampleGroup(params, prompt_ids, output_ids, draft_ids)]).token_ids
        positions = list(range(9, 14))
        gumbel = noise.gumbel([params.seed] * 5, positions, vocab_size)
        for row in range(5):
            scores = transformers_scores(logits[row], params, prompt_ids, output_ids + draft_ids[:row])
            assert chosen[row] == int((scores + gumbel[row]).argmax()), (params, row)


def test_greedy_sampling_is_the_argmax_after_transformers_processors() -> None:
    rng = np.random.default_rng(7)
    for _ in range(60):
        params = random_params(rng, 40)
        prompt_ids, output_ids, draft_ids = (rng.integers(0, 40, n).tolist() for n in (6, 3, 4))
        logits = torch.from_numpy(rng.normal(size=(5, 40)) * 4).to(torch.float32)
        greedy = dataclasses.replace(params, temperature=0.0)
        chosen = choose_tokens(logits, [SampleGroup(greedy, prompt_ids, output_ids, draft_ids)]).token_ids
        for row in range(5):
            scores = transformers_scores(logits[row], params, prompt_ids, output_ids + draft_ids[:row])
            assert chosen[row] == int(scores.argmax())
