"""Fixtures: a tiny tokenizer, and clusters of a router with fake workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import CHAT_TEMPLATE, Cluster, MakeCluster, byte_tokenizer_json, running_cluster


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")


@pytest.fixture
async def make_cluster(tokenizer: Tokenizer) -> AsyncIterator[MakeCluster]:
    """Makes clusters and takes them down."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> Cluster:
            return await stack.enter_async_context(running_cluster(tokenizer, **options))

        yield make
