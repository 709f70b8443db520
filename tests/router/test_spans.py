"""The span of a request: the status its call ended with, and whose fault that was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from betoken.common import names
from tests.router.harness import Cluster, MakeCluster, request


async def answered(cluster: Cluster) -> None:
    await cluster.generate(max_new_tokens=3)


async def refused(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.generate(max_new_tokens=0)


async def given_up(cluster: Cluster) -> None:
    call = cluster.stub.Generate(request(max_new_tokens=100, ignore_eos=True))
    await call.read()
    call.cancel()


async def too_late(cluster: Cluster) -> None:
    # Long enough to reach the router on a machine that pauses: a call that is over before has no span.
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.generate(deadline_s=2.0, max_new_tokens=2000, ignore_eos=True)


@pytest.mark.parametrize(
    ("ask", "status", "is_fault"),
    [
        (answered, "OK", False),
        (refused, "INVALID_ARGUMENT", False),
        (given_up, "CANCELLED", False),
        (too_late, "DEADLINE_EXCEEDED", True),
    ],
)
async def test_a_requests_span_has_the_status_of_its_call(
    make_cluster: MakeCluster,
    exported: InMemorySpanExporter,
    ask: Callable[[Cluster], Awaitable[None]],
    status: str,
    is_fault: bool,
) -> None:
    cluster = await make_cluster(num_drafters=0, step_s=0.01)
    await ask(cluster)

    def spans() -> list[ReadableSpan]:
        return [span for span in exported.get_finished_spans() if span.name == names.SPAN_GENERATE]

    await cluster.until(lambda: bool(spans()))
    (span,) = spans()
    assert span.attributes is not None
    assert span.attributes[names.RPC_RESPONSE_STATUS_CODE] == status
    assert span.attributes[names.REQUEST_ID], "the client is given it, whatever became of the request"
    assert span.attributes[names.RPC_METHOD] == "betoken.v1.GenerationService/Generate"
    assert span.attributes.get(names.ERROR_TYPE) == (status if is_fault else None)
    assert (span.status.status_code is StatusCode.ERROR) == is_fault
