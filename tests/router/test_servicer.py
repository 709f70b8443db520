"""The public service: what one call of Generate holds while it runs, and what it sends."""

from __future__ import annotations

from betoken.router.responses import response_of
from betoken.router.round.events import PromptLogprobsPart
from betoken.v1.types_pb2 import TokenLogprobs
from tests.router.harness import MakeCluster, request


async def test_the_servicer_releases_the_bytes_of_a_request_with_its_first_message(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster(step_s=0.01)
    call = cluster.stub.Generate(request(prompt_ids=[5] * 100, max_new_tokens=500, ignore_eos=True), timeout=30)
    assert (await call.read()).WhichOneof("event") == "start"
    assert (cluster.router.waiting_bytes.num_bytes, cluster.router.admission.num_running) == (0, 1)
    call.cancel()
    await cluster.until_idle()


async def test_the_servicer_names_the_answer_of_each_prompt_logprobs_message(make_cluster: MakeCluster) -> None:
    part = PromptLogprobsPart(4, [TokenLogprobs(logprob=-0.5)])
    response = response_of(part, 2, (await make_cluster()).router.fleet)
    assert (response.answer, response.prompt_logprobs.first_position) == (2, 4)
    assert [each.logprob for each in response.prompt_logprobs.logprobs] == [-0.5]
