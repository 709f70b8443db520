"""Generations through the SDK: one timed stream, or a bounded number at once.

Knows no process; the caller has services running and a client connected.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

from asyncio_pool import AioPool

from betoken.bench.matrix import NO_DRAFTER
from betoken.cli.report import TimedCompletion
from betoken.client import AsyncClient, Sampling, Speculation, VerificationMode

Item = TypeVar("Item")
Result = TypeVar("Result")


def speculation(
    drafter: str,
    num_draft_tokens: int | None = None,
    mode: VerificationMode | None = None,
    settings: Mapping[str, str] | None = None,
) -> Speculation:
    """Names a drafter with its settings, or turns speculation off for "none"."""
    if drafter == NO_DRAFTER:
        return Speculation(off=True)
    return Speculation(drafter, settings or None, num_draft_tokens, mode=mode)


def sampling(
    max_new_tokens: int, temperature: float, top_p: float = 1.0, seed: int | None = None, ignore_eos: bool = False
) -> Sampling:
    """Sampling parameters as passed to `generate()`; both sides take other parameters from the model's config."""
    return Sampling(
        temperature=temperature, top_k=0, top_p=top_p, seed=seed, max_new_tokens=max_new_tokens, ignore_eos=ignore_eos
    )


async def generate(
    client: AsyncClient,
    prompt: str,
    sampling: Sampling,
    speculation: Speculation,
    on_tokens: Callable[[int], None] | None = None,
    tenant: str = "",
) -> TimedCompletion:
    """Run one stream to its end; `on_tokens` hears how many tokens each piece brought."""
    start = time.perf_counter()
    generation = client.generate(prompt, sampling=sampling, speculation=speculation, tenant=tenant)
    async for piece in generation:
        if on_tokens is not None:
            on_tokens(len(piece.tokens))
    return TimedCompletion(await generation.result(), time.perf_counter() - start)


async def top_two_gap(client: AsyncClient, prompt: str, position: int, ignore_eos: bool = False) -> float:
    """Distance of the target's two best logits where greedy decoding chooses output token `position` (0-based)."""
    greedy = sampling(position + 1, temperature=0, ignore_eos=ignore_eos)
    completion = await client.complete(prompt, sampling=greedy, off=True, logprobs=2)
    logprobs = completion.tokens[-1].logprobs
    if logprobs is None or len(completion.tokens) != position + 1:
        raise ValueError(f"the answer ended before position {position} or came without logprobs")
    (_, best), (_, second) = logprobs.top
    return best - second


async def run_bounded(
    items: Sequence[Item], work: Callable[[Item], Awaitable[Result]], concurrency: int
) -> list[Result]:
    """`work` over all items, at most `concurrency` at once; results in the items' order, the first error raised.

    AioPool's workers outlive a cancelled caller, so each is cancelled here when this call does not end well.
    """
    async with AioPool(size=concurrency) as pool:
        futures: list[asyncio.Future[Result]] = []
        try:
            for item in items:
                futures.append(await pool.spawn(work(item)))
            return list(await asyncio.gather(*futures))
        finally:
            for future in futures:
                if not future.done():
                    await pool.cancel(future)
