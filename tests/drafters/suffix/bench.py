"""Sequences of tenants in a drafter with a memory, and the rounds that an answer takes."""

import random

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.suffix.drafter import SuffixDrafter
from betoken.drafters.suffix.memory import CORPUS, SuffixMemory
from betoken.drafters.suffix.settings import SuffixSettings
from betoken.drafters.suffix.text_store import TextStore
from betoken.engine.sampling import SamplingParams

RNG = random.Random(5)
PROMPT = [RNG.randrange(1000) for _ in range(20)]
ANSWER = [RNG.randrange(1000) for _ in range(60)]
KEYS = iter(range(1000))


def drafter_with(shares_tenants=False, corpus=(), **settings):
    store = TextStore(4096) if corpus else None
    for text in corpus:
        store.add(CORPUS, text)
    return SuffixDrafter(SuffixMemory(1 << 20, shares_tenants, store), SuffixSettings(**settings))


def opened(drafter, prompt_ids=PROMPT, tenant=b"a", output_ids=(), **fields):
    params = SamplingParams(eos_token_ids=(0,))
    sequence = DraftSequence((1, next(KEYS)), params, prompt_ids, list(output_ids), 500, tenant=tenant, **fields)
    drafter.open(sequence)
    return sequence


def committed(drafter, sequence, ids):
    sequence.commit(ids)
    drafter.commit(sequence, list(ids))


def drafted(drafter, sequence, num_tokens=8):
    drafter.request(sequence, num_tokens)
    (answer,) = drafter.step()
    answer.check()
    return answer


def num_rounds(drafter, answer=ANSWER, **fields):
    """Rounds that an answer takes with drafts of eight tokens; then its sequence is closed."""
    sequence = opened(drafter, **fields)
    num_rounds = 0
    while len(sequence.output_ids) < len(answer):
        rest = answer[len(sequence.output_ids) :]
        ids, num_accepted = drafted(drafter, sequence).draft_ids, 0
        while num_accepted < min(len(ids), len(rest) - 1) and ids[num_accepted] == rest[num_accepted]:
            num_accepted += 1
        committed(drafter, sequence, rest[: num_accepted + 1])
        num_rounds += 1
    drafter.close(sequence)
    return num_rounds
