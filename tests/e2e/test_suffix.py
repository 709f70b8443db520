"""A memory across requests, remote and attached, over real services: equal tokens, fewer rounds, tenants apart."""

from pathlib import Path
from typing import Any

import pytest

from betoken.client import AsyncClient, Completion, Sampling, Speculation, VerificationMode
from tests.e2e.in_process import save_pair, services, until_all_pages_are_free

PROMPTS = [f"{n} is {n} and {n} is {n}, so {n} is " for n in range(4)]
PLACES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "remote": ({"drafters": ("suffix",)}, {}),
    "attached": ({"drafters": ("ngram",)}, {"attached_drafters": ("suffix",)}),
}


async def answer(
    client: AsyncClient, prompt: str, temperature: float, how: Speculation, tenant: str = "a"
) -> Completion:
    sampling = Sampling(temperature=temperature, seed=3, max_new_tokens=48, ignore_eos=True, logprobs=2)
    return await client.complete(prompt, sampling=sampling, speculation=how, tenant=tenant)


def reported(completion: Completion) -> object:
    return completion.output_ids, [token.logprobs for token in completion.tokens]


@pytest.mark.parametrize("place", PLACES)
async def test_a_second_request_is_drafted_from_the_first_answer_of_its_tenant_alone(
    tmp_path: Path, place: str
) -> None:
    save_pair(tmp_path)
    draft, verify = PLACES[place]
    async with services(tmp_path, draft, verify) as client:
        for temperature, branches in ((0.8, 1), (0.8, 4), (0.0, 4)):
            tenant = f"{temperature}-{branches}"
            how = Speculation("suffix", {"max_branches": branches}, num_draft_tokens=6)
            num_accepted = []
            for prompt in PROMPTS:
                plain = await answer(client, prompt, temperature, Speculation(off=True))
                runs = [await answer(client, prompt, temperature, how, tenant) for _ in range(2)]
                runs.append(await answer(client, prompt, temperature, how, f"other-{prompt}-{tenant}"))
                assert [reported(run) for run in runs] == [reported(plain)] * 3
                num_accepted.append([run.speculation.num_accepted_tokens for run in runs])
                again = [token.source for token in runs[1].tokens if token.source]
                assert set(again) <= {"suffix", "ngram"} and again.count("suffix") > 20
                assert "suffix" not in {token.source for token in runs[2].tokens}
            first, second, of_others = map(sum, zip(*num_accepted, strict=True))
            assert second > first + 40 and of_others < second - 40
        workers = [*(await client.model_info()).verify_workers, *(await client.model_info()).draft_workers]
        assert sum(worker.memory_documents for worker in workers) > 0
        await until_all_pages_are_free(client)


async def test_modes_whose_tokens_depend_on_drafts_repeat_with_a_growing_memory(tmp_path: Path) -> None:
    save_pair(tmp_path)
    async with services(tmp_path, *PLACES["attached"]) as client:
        for mode in (VerificationMode.REJECTION, VerificationMode.TYPICAL):
            how = Speculation("suffix", mode=mode)
            runs = [reported(await answer(client, PROMPTS[0], 0.8, how)) for _ in range(3)]
            assert runs == [runs[0]] * 3
