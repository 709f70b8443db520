"""The tiny pair with whatever can be attached to its target: n-grams, fitted Medusa heads, a random EAGLE-3 layer."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from scipy import stats

from betoken.client import AsyncClient, Completion, Sampling, Speculation
from tests.drafters.eagle3.tiny import save_layer, tiny_layer, tiny_shape
from tests.drafters.medusa.fit import fit_heads
from tests.e2e.in_process import VOCAB_SIZE, save_pair

DRAFTERS = ("ngram", "medusa", "eagle3")
TEMPERATURES = {"ngram": 0.0, "medusa": 0.8, "eagle3": 0.8}
"""Temperature at which some tokens of each are accepted: what is greedy repeats itself, noise makes drafters agree."""

PROMPTS = [f"{n} is {n} and {n} is {n}, so {n} is " for n in range(8)]


def save_eagle3(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Writes a layer for the pair; the options of a verify worker for it."""
    shape = tiny_shape(
        hidden_size=32, target_hidden_size=32, vocab_size=VOCAB_SIZE, draft_vocab_size=200, state_layers=(0, 1, 1)
    )
    save_layer(folder / "eagle3", tiny_layer(shape, seed, spread=0.4))
    return {"eagle3": str(folder / "eagle3")}


def save_attached(folder: Path, family: str = "llama") -> dict[str, Any]:
    """Writes the pair and weights; the options of a verify worker that has all of them attached."""
    save_pair(folder, family)
    heads = fit_heads(folder / "target", folder / "heads")
    return {"attached_drafters": DRAFTERS, "medusa": heads} | save_eagle3(folder)


async def answers(
    client: AsyncClient, speculation: Speculation, temperature: float, prompts: list[str] = PROMPTS, **others: Any
) -> list[Completion]:
    """All prompts at once."""
    fields = {"seed": 3, "max_new_tokens": 32, "ignore_eos": True, "logprobs": 2} | others
    sampling = Sampling(temperature=temperature, **fields)
    waiting = [client.complete(prompt, sampling=sampling, speculation=speculation) for prompt in prompts]
    return await asyncio.gather(*waiting)


def reported(completions: list[Completion]) -> list[object]:
    return [(one.output_ids, [token.logprobs for token in one.tokens]) for one in completions]


async def assert_distributed_as_plain(client: AsyncClient, speculation: Speculation, num_samples: int) -> None:
    """The first two tokens over many seeds, by rejection and without drafts. The second is of the first draft."""
    plain, drafted = [await _sampled(client, num_samples, how) for how in (Speculation(off=True), speculation)]
    pairs = sorted(plain.keys() | drafted.keys())
    assert len(pairs) > 4
    assert plain != drafted, "drafts choose tokens"
    assert stats.chi2_contingency([[counts[pair] for pair in pairs] for counts in (plain, drafted)]).pvalue > 1e-3


async def _sampled(client: AsyncClient, num_samples: int, speculation: Speculation) -> Counter[tuple[int, int]]:
    """How often each pair of tokens begins an answer."""
    counts: Counter[tuple[int, int]] = Counter()
    num_accepted = 0
    for start in range(0, num_samples, 60):
        samplings = [
            Sampling(temperature=0.8, top_k=4, seed=seed, max_new_tokens=3, ignore_eos=True)
            for seed in range(start, start + 60)
        ]
        waiting = [client.complete([5, 6, 7, 5], sampling=one, speculation=speculation) for one in samplings]
        for answer in await asyncio.gather(*waiting):
            counts[answer.output_ids[:2]] += 1
            num_accepted += answer.speculation.num_accepted_tokens
    assert (num_accepted == 0) == bool(speculation.off)
    return counts
