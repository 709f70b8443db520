"""All three services in one process, over real gRPC, with a tiny random pair: quick to start, and never out of time."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3_5TextConfig

from betoken.client import AsyncClient, RetryPolicy
from betoken.draft_worker import service as draft_service
from betoken.draft_worker.handler import DraftLinkHandler, DraftResults
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.engine.model_thread import ModelThread
from betoken.router.core import Router
from betoken.router.scopes import RequestScopes
from betoken.router.servicer import GenerationServicer
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.decoding import TypedDecoding
from betoken.rpc.link import LinkServicer
from betoken.rpc.server import PING_OPTIONS
from betoken.v1 import draft_pb2_grpc, generation_pb2_grpc, verify_pb2_grpc
from betoken.v1.draft_pb2 import DraftLinkResponse
from betoken.v1.types_pb2 import WorkerHello
from betoken.v1.verify_pb2 import VerifyLinkResponse
from betoken.verify_worker import service as verify_service
from betoken.verify_worker.handler import VerifyLinkHandler, VerifyResults
from betoken.verify_worker.settings import VerifyWorkerSettings
from tests.router.harness import CHAT_TEMPLATE, byte_tokenizer_json, router_settings

VOCAB_SIZE = 272
# However slow the machine and whatever a drafter does, the router goes on asking it.
PATIENCE: dict[str, Any] = {
    "draft_timeout_s": 60.0,
    "first_draft_timeout_s": 60.0,
    "max_draft_failures": 1000,
    "drafts_must_pay": False,
}
ENGINE: dict[str, Any] = {"dtype": "float32", "threads": 1, "compile": "off", "num_pages": 256}


_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "initializer_range": 0.35,
}
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES, num_hidden_layers=1),
    "llama of two layers": lambda: LlamaConfig(**_SIZES, num_hidden_layers=2),
    "qwen3_5": lambda: Qwen3_5TextConfig(
        **_SIZES,
        pad_token_id=0,
        num_hidden_layers=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    ),
}


def save_pair(folder: Path, family: str = "llama") -> None:
    """Writes a random target and, as its draft, the same weights with noise."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family]())
    for name in ("target", "draft"):
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text(byte_tokenizer_json())
        for weight in model.parameters():
            weight.data += 0.02 * torch.randn_like(weight)


def save_pard_pair(folder: Path) -> int:
    """As `save_pair`, with a draft that is a PARD model; return its mask token."""
    save_pair(folder)
    return mark_pard(folder)


def mark_pard(folder: Path) -> int:
    """Make the draft of a pair a PARD model; return its mask token."""
    config, mask_token_id = folder / "draft" / "config.json", VOCAB_SIZE - 1
    config.write_text(json.dumps(json.loads(config.read_text()) | {"pard_token": mask_token_id}))
    return mask_token_id


@asynccontextmanager
async def served(register_servicer: Callable[[Any], None]) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[TypedDecoding()], options=PING_OPTIONS)
    register_servicer(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.2)


@dataclass(frozen=True)
class CheckIntegrity:
    """A command of tests: have the core check itself."""

    checked: Future[None] = field(default_factory=Future)


class Hold:
    """Stops a worker's model after some steps, so that what a test does next falls into the middle of answers."""

    def __init__(self) -> None:
        self._steps_left: int | None = None
        self._is_holding, self._is_released = threading.Event(), threading.Event()

    def after(self, num_steps: int) -> None:
        """Let the model take so many steps more, and stop before the next, until `release`."""
        self._is_holding.clear()
        self._is_released.clear()
        self._steps_left = num_steps

    def resume(self, num_steps: int) -> None:
        """Let the stopped model take so many steps more, and stop before the next."""
        self._is_holding.clear()
        self._steps_left = num_steps
        self._is_released.set()

    def release(self) -> None:
        """Let it go on."""
        self._steps_left = None
        self._is_released.set()

    async def reached(self) -> None:
        """Return once it has stopped."""
        assert await asyncio.to_thread(self._is_holding.wait, 120), "all answers were over before"

    def wait(self) -> None:
        """Called by the model's thread before each step."""
        if self._steps_left == 0:
            self._is_holding.set()
            self._is_released.wait()
            if self._steps_left is not None:  # resumed
                self._is_released.clear()
        if self._steps_left is not None:
            self._steps_left -= 1


class CheckableCore:
    """A worker's core that takes `CheckIntegrity` too, and can be held."""

    def __init__(self, core: Any, hold: Hold) -> None:
        self._core, self._hold = core, hold
        self.expire = core.expire

    @property
    def has_work(self) -> bool:
        return bool(self._core.has_work)

    def step(self) -> None:
        self._hold.wait()
        self._core.step()

    def apply(self, command: Any) -> None:
        if not isinstance(command, CheckIntegrity):
            self._core.apply(command)
            return
        try:
            self._core.check_integrity()
            command.checked.set_result(None)
        except BaseException as error:
            command.checked.set_exception(error)


@asynccontextmanager
async def worker(
    load: Callable[[Any, WorkerHello], Any], results: Any, serve: Callable[..., Any], hold: Hold
) -> AsyncIterator[str]:
    """A worker's address; `load` makes its core on the model thread, `serve` its (servicer, registration)."""
    hello = WorkerHello()
    thread: ModelThread[Any] = ModelThread(lambda: CheckableCore(load(results, hello), hold), "model")
    await asyncio.wrap_future(thread.start())
    try:
        async with served(lambda server: serve(thread, hello, server)) as address:
            yield address
    finally:
        hold.release()
        await asyncio.to_thread(thread.stop, 5.0)


@asynccontextmanager
async def verify_worker(
    folder: Path, options: dict[str, Any], threads: list[ModelThread[Any]], hold: Hold
) -> AsyncIterator[str]:
    """The address of a worker that serves the folder's target; its thread is appended."""
    results = VerifyResults()
    grammars: list[Any] = []
    settings = VerifyWorkerSettings(model=str(folder / "target"), **ENGINE | options)

    def serve(thread: ModelThread[Any], hello: WorkerHello, server: Any) -> None:
        threads.append(thread)
        handler = VerifyLinkHandler(thread.submit, results, hello, *grammars)
        servicer = LinkServicer(lambda: hello, handler, VerifyLinkResponse)
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(servicer, server)

    async with worker(lambda *args: verify_service._load(settings, *args, grammars), results, serve, hold) as address:
        yield address


@dataclass
class Running:
    """The services' addresses, the models' threads, and a client."""

    address: str
    verify: str
    draft: str
    threads: tuple[ModelThread[Any], ...]
    client: AsyncClient
    lose_draft: Callable[[], Awaitable[None]]
    """Ends the draft worker: its link breaks."""
    verify_workers: tuple["Losable", ...]

    @property
    def verify_hold(self) -> Hold:
        """Stops the first verify worker's model."""
        return self.verify_workers[0].hold

    async def lose_verify(self) -> None:
        """End the first verify worker: its link breaks."""
        await self.verify_workers[0].lose()


@dataclass(frozen=True)
class Losable:
    """A verify worker that a test can stop, and end."""

    hold: Hold
    lose: Callable[[], Awaitable[None]]
    """Ends the worker: its link breaks."""


@asynccontextmanager
async def services(
    folder: Path, draft_options: dict[str, Any] | None = None, verify_options: dict[str, Any] | None = None
) -> AsyncIterator[AsyncClient]:
    """A client of a router with one verify and one draft worker that serve the pair in `folder`."""
    async with running(folder, draft_options, verify_options) as services:
        yield services.client


@asynccontextmanager
async def running(
    folder: Path,
    draft_options: dict[str, Any] | None = None,
    verify_options: dict[str, Any] | None = None,
    router_options: dict[str, Any] | None = None,
    chat_template: str = CHAT_TEMPLATE,
    other_verify_options: Sequence[dict[str, Any]] = (),
    more_verify: Sequence[str] = (),
) -> AsyncIterator[Running]:
    """These services, with all that a test may want of them.

    Args:
        other_verify_options: options of further verify workers.
        more_verify: addresses of verify workers that run already.
    """
    threads: list[ModelThread[Any]] = []
    draft_results = DraftResults()
    grammar_of: list[Any] = []
    draft_settings = DraftWorkerSettings(model=str(folder / "draft"), **ENGINE | (draft_options or {}))

    def serve_draft(thread: ModelThread[Any], hello: WorkerHello, server: Any) -> None:
        threads.append(thread)
        handler = DraftLinkHandler(
            thread.submit,
            draft_results,
            draft_settings.max_draft_tokens,
            max_context=hello.max_context,
            grammar_of=grammar_of[0] if grammar_of else None,
        )
        servicer = LinkServicer(lambda: hello, handler, DraftLinkResponse)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(servicer, server)

    async with AsyncExitStack() as stack:
        addresses, verify_workers = [], []
        for options in (verify_options or {}, *other_verify_options):
            own = await stack.enter_async_context(AsyncExitStack())
            verify_workers.append(Losable(Hold(), own.aclose))
            serving = verify_worker(folder, options, threads, verify_workers[-1].hold)
            addresses.append(await own.enter_async_context(serving))

        def load_draft(*loading: Any) -> Any:
            return draft_service._load(draft_settings, *loading, grammar_of)

        drafting = await stack.enter_async_context(AsyncExitStack())
        draft = await drafting.enter_async_context(worker(load_draft, draft_results, serve_draft, Hold()))
        tokenizer = Tokenizer(
            (folder / "target" / "tokenizer.json").read_text(), {"eos_token": "<eos>"}, chat_template, "test"
        )
        options = PATIENCE | (router_options or {})
        router = Router(
            router_settings(verify=(*addresses, *more_verify), draft=(draft,), tokenizer="test", **options),
            tokenizer,
        )
        links = asyncio.ensure_future(router.run())
        stack.callback(links.cancel)
        stack.push_async_callback(router.close)
        add = generation_pb2_grpc.add_GenerationServiceServicer_to_server
        servicer = GenerationServicer(router, RequestScopes(router))
        address = await stack.enter_async_context(served(lambda server: add(servicer, server)))
        client = AsyncClient(address, retry=RetryPolicy(max_retries=0))
        stack.push_async_callback(client.close)
        async with asyncio.timeout(60):
            while not (await client.model_info()).drafters:  # noqa: ASYNC110 - offered once the draft worker has passed its probe
                await asyncio.sleep(0.02)
        yield Running(address, addresses[0], draft, tuple(threads), client, drafting.aclose, tuple(verify_workers))


async def until_all_pages_are_free(client: AsyncClient) -> None:
    async with asyncio.timeout(60):
        while True:
            info = await client.model_info()
            if all(w.free_pages == w.total_pages for w in (*info.verify_workers, *info.draft_workers)):
                return
            await asyncio.sleep(0.02)
