"""A gateway over a router over fake workers: everything real but the models, all in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2
import openai
import pytest

from betoken.client import AsyncClient, RetryPolicy
from betoken.gateway.app import create_app
from betoken.gateway.server import serve
from betoken.gateway.settings import GatewaySettings
from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import CHAT_TEMPLATE, Cluster, byte_tokenizer_json, running_cluster


@dataclass
class Gate:
    """A running gateway."""

    url: str
    cluster: Cluster
    http: httpx2.AsyncClient
    openai: openai.AsyncOpenAI

    async def post(self, path: str, body: Any, **headers: str) -> httpx2.Response:
        return await self.http.post(path, json=body, headers=headers)


MakeGate = Callable[..., Awaitable[Gate]]


@asynccontextmanager
async def running_gateway(cluster: Any, address: str = "", **settings: Any) -> AsyncIterator[Gate]:
    """A gateway in front of `cluster`, or of whatever serves at `address`."""
    options = GatewaySettings(port=0, router=address or cluster.address, **settings)
    stop, port = asyncio.Event(), asyncio.get_running_loop().create_future()
    retry = RetryPolicy(initial_backoff_s=0.02, max_outage_s=options.max_outage_s, retry_while_loading=False)
    async with AsyncClient(options.router, retry=retry) as client, asyncio.TaskGroup() as tasks:
        tasks.create_task(serve(create_app(client, options), options, stop=stop, on_ready=port.set_result))
        url = f"http://127.0.0.1:{await port}"
        async with (
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0, timeout=60) as asking,
        ):
            yield Gate(url, cluster, http, asking)
        stop.set()


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")


@asynccontextmanager
async def making_gates(tokenizer: Tokenizer) -> AsyncIterator[MakeGate]:
    """Makes gateways over separate clusters; `gateway` holds the gateway's settings, the rest the cluster's."""
    async with AsyncExitStack() as stack:

        async def make(gateway: dict[str, Any] | None = None, **options: Any) -> Gate:
            cluster = await stack.enter_async_context(running_cluster(tokenizer, **options))
            return await stack.enter_async_context(running_gateway(cluster, **(gateway or {})))

        yield make


@pytest.fixture
async def make_gate(tokenizer: Tokenizer) -> AsyncIterator[MakeGate]:
    """Makes gateways in the test's event loop."""
    async with making_gates(tokenizer) as make:
        yield make


@pytest.fixture
async def gate(make_gate: MakeGate) -> Gate:
    """One with a verify and a draft worker."""
    return await make_gate()
