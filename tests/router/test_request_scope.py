"""The line that the log has of each request: what became of it, who worked at it, and nothing that it said."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest

from betoken.common.logs import _Text
from tests.router.harness import Cluster, MakeCluster, request

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """The fields of all lines so far."""
    caplog.set_level("INFO", "betoken")

    def reported() -> list[dict[str, Any]]:
        records = [record for record in caplog.records if record.name == "betoken.router.request_scope"]
        assert all(record.levelno == logging.INFO for record in records)
        return [vars(record)["fields"] for record in records]

    return reported


async def ended(cluster: Cluster, lines: Any, number: int = 1) -> list[dict[str, Any]]:
    await cluster.until(lambda: len(lines()) == number)
    return lines()


async def test_an_answer_has_one_line_with_what_became_of_it(make_cluster: MakeCluster, lines: Any) -> None:
    cluster = await make_cluster()
    call = cluster.stub.Generate(
        request(prompt="the secret", max_new_tokens=12, ignore_eos=True, num_draft_tokens=4, tenant="a b"),
        metadata=(("traceparent", TRACEPARENT),),
    )
    events = [event async for event in call]
    (line,) = await ended(cluster, lines)
    start, finish = events[0].start, events[-1].finish
    assert line["request_id"] == start.request_id
    assert (line["status"], line["finish"], line["model"]) == ("OK", "length", start.model)
    assert line["prompt_tokens"] == len(start.prompt_ids) == finish.usage.prompt_tokens
    assert line["output_tokens"] == 12 and "resumed_tokens" not in line
    assert (line["draft_tokens"], line["accepted_tokens"]) == (
        finish.speculation.num_draft_tokens,
        finish.speculation.num_accepted_tokens,
    )
    assert line["draft_tokens"] > 0 and line["drafter"] == start.drafter != ""
    assert line["verify_worker"] == cluster.verifiers[0].hello.worker_id
    assert line["draft_worker"] == cluster.drafters[0].hello.worker_id
    assert (line["tenant"], line["trace_id"]) == ("a b", TRACE_ID)
    assert 0 < line["first_token_s"] < line["duration_s"]
    assert "error" not in line and "secret" not in str(line)


async def test_a_refused_request_has_a_line_that_does_not_quote_it(make_cluster: MakeCluster, lines: Any) -> None:
    cluster = await make_cluster(num_drafters=0)
    for fields in ({"stop": ["secret" * 100]}, {"model": "secret"}):
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.generate(**fields)
    refused, not_found = await ended(cluster, lines, 2)
    assert refused["status"] == "INVALID_ARGUMENT" and refused["error"].startswith("sampling.stop")
    assert not_found["status"] == "NOT_FOUND" and "error" not in not_found
    assert "secret" not in str(lines())


async def test_a_request_that_is_given_up_has_a_line_with_what_it_got(make_cluster: MakeCluster, lines: Any) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.005)
    call = cluster.stub.Generate(request(max_new_tokens=1000, ignore_eos=True))
    num_read = 0
    while num_read < 5:
        num_read += len((await call.read()).tokens.tokens)
    call.cancel()
    (line,) = await ended(cluster, lines)
    assert line["status"] == "CANCELLED" and line["output_tokens"] >= num_read
    assert line["first_token_s"] > 0 and "finish" not in line and "error" not in line


async def test_a_line_names_all_workers_of_a_failover_and_why_it_ended(make_cluster: MakeCluster, lines: Any) -> None:
    cluster = await make_cluster(num_drafters=0, num_verifiers=2, step_s=0.005, failover_timeout_s=0.2)
    call = cluster.stub.Generate(request(max_new_tokens=2000, ignore_eos=True))
    await call.read()
    first, second = sorted(cluster.verifiers, key=lambda verifier: -verifier.num_open)
    names = [first.hello.worker_id, second.hello.worker_id]
    await first.kill()
    await cluster.until(lambda: second.num_steps >= 5)
    await second.kill()
    with pytest.raises(grpc.aio.AioRpcError) as broken:
        while await call.read() is not grpc.aio.EOF:
            pass
    (line,) = await ended(cluster, lines)
    assert line["verify_worker"].split(",") == names
    assert (line["status"], line["error"]) == ("UNAVAILABLE", broken.value.details())
    assert line["failovers"] == 2


def test_a_line_is_read_by_its_keys() -> None:
    record = logging.makeLogRecord({"msg": "request ended", "fields": {"request_id": "ab", "tenant": 'x" finish=stop'}})
    assert _Text().format(record).endswith('request ended request_id=ab tenant="x\\" finish=stop"')
