"""Real services for the end-to-end tests, started once per session."""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from betoken.bench.prompts import OWN_PROMPTS, load_prompts
from betoken.bench.stack import Stack
from betoken.cli.local_services import LocalServicesConfig
from tests.e2e.router_constants import constants, taken

sys.path.insert(0, str(Path(__file__).parent))
from pair import Pair, find_or_make_pair  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for the forwards of each service: threads of several services would wait for each other's cores."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BETOKEN_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The model pair all end-to-end tests use."""
    return find_or_make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def prompts() -> list[str]:
    """Texts of the benchmark's own prompts."""
    return [prompt.text for prompt in load_prompts(OWN_PROMPTS)]


PATIENCE = ("--draft-timeout-s", "60", "--first-draft-timeout-s", "60")
"""Options of a router that waits for every draft, so that the number of drafts is independent of the machine's load."""


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(pair: Pair) -> AsyncIterator[Stack]:
    """Router and workers, eager, in bf16; a test that injects a fault recovers from it."""
    config = LocalServicesConfig(
        pair.target,
        pair.draft,
        compile="off",
        verify_options=("--threads", "1"),
        draft_options=("--worker-id", "e2e-draft", "--threads", "1"),
        router_options=(*constants(max_probe_pause_s=1.0, max_draft_failures=1000), *PATIENCE),
    )
    async with AsyncExitStack() as exits:
        with taken():
            running = await exits.enter_async_context(Stack(config))
        yield running
