"""A router over fake workers, all in this process, all over real gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from betoken.router.access.interceptor import KeysFirst
from betoken.router.core import Router
from betoken.router.scopes import RequestScopes
from betoken.router.servicer import GenerationServicer
from betoken.router.settings import RouterSettings
from betoken.router.text.chat import Chat
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.decoding import TypedDecoding
from betoken.rpc.link import LinkOptions
from betoken.rpc.server import PING_OPTIONS
from betoken.testing.fake_draft_worker import FakeDraftWorker, draft_hello
from betoken.testing.fake_model import FakeModel, sequence
from betoken.testing.fake_verify_worker import FakeVerifyWorker, verify_hello
from betoken.v1 import generation_pb2 as pb
from betoken.v1.generation_pb2_grpc import GenerationServiceStub, add_GenerationServiceServicer_to_server
from tests.raw_http2 import RawConnection

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
LINK_OPTIONS = LinkOptions(initial_backoff_s=0.02, max_backoff_s=0.1, connect_timeout_s=2.0, drain_timeout_s=0.5)


def byte_tokenizer_json() -> str:
    """A tokenizer of single bytes and a few merges; id 0 is EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {character: index + 1 for index, character in enumerate(alphabet)}
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("o", "n")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    fast = FastTokenizer(BPE(vocab, merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens([AddedToken("<eos>", special=True)])
    return fast.to_str()


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """Token ids of a chat, as the router makes them."""
    return tokenizer.encode(tokenizer.render(Chat(messages)), add_special_tokens=False)


def with_special_tokens(tokenizer_json: str, *names: str) -> str:
    """A tokenizer with more special tokens."""
    fast = FastTokenizer.from_str(tokenizer_json)
    fast.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return fast.to_str()


def byte_fallback_tokenizer_json() -> str:
    """A tokenizer in the manner of SentencePiece: a few characters, and tokens of single bytes for all others."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {character: len(vocab) + index for index, character in enumerate("\u2581ab\n")}
    fast = FastTokenizer(BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    fast.add_special_tokens([AddedToken("</s>", special=True)])
    return fast.to_str()


@dataclass
class Reply:
    """A whole answer stream."""

    start: pb.GenerateStart = field(default_factory=pb.GenerateStart)
    prompt: list[tuple[int, float, list[int]]] = field(default_factory=list)
    """Position, logprob and likeliest ids of the prompt's tokens, as they came."""
    tokens: list[pb.GeneratedToken] = field(default_factory=list)
    text: str = ""
    finish: pb.GenerateFinish = field(default_factory=pb.GenerateFinish)
    messages: list[pb.GenerateTokens] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Cluster:
    """A router, its workers, and a client."""

    def __init__(self, tokenizer: Tokenizer, model: FakeModel) -> None:
        self.tokenizer = tokenizer
        self.model = model
        self.verifiers: list[FakeVerifyWorker] = []
        self.drafters: list[FakeDraftWorker] = []
        self.router: Router
        self.server: grpc.aio.Server
        self.stub: Any
        self.address = ""
        self.channel: grpc.aio.Channel

    async def generate(self, deadline_s: float | None = 60.0, **fields: Any) -> Reply:
        """One request, read to its end."""
        reply = Reply()
        async for event in self.stub.Generate(request(**fields), timeout=deadline_s):
            add_event(reply, event)
        return reply

    def target_ids(self, num_tokens: int, prompt_ids: list[int], seed: int = 0, **sampling: Any) -> list[int]:
        """The target's tokens, EOS ignored."""
        entry = sequence(prompt_ids, seed=seed)
        for name, value in sampling.items():
            setattr(entry.sampling, name, value)
        return self.model.generate(entry, num_tokens)

    async def until(self, condition: Callable[[], bool], within_s: float = 30.0) -> None:
        """Wait for a state of the workers."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    async def until_idle(self) -> None:
        """All sequences are closed everywhere, and no worker saw a violation of the protocol."""
        workers = (*self.verifiers, *self.drafters)
        # A request may be admitted already and not yet open anywhere.
        await self.until(lambda: not self.router.admission.num_running and not any(w.num_open for w in workers))
        for worker in workers:
            assert not worker.violations, worker.violations


def request(**fields: Any) -> pb.GenerateRequest:
    """A request of keyword arguments: `prompt`, `prompt_ids`, sampling and speculation fields by name."""
    message = pb.GenerateRequest()
    for name, value in fields.items():
        if name in pb.GenerateRequest.DESCRIPTOR.fields_by_name and name not in ("prompt_ids", "messages"):
            _set(message, name, value)
        elif name == "prompt_ids":
            message.prompt_ids.SetInParent()
            message.prompt_ids.ids.extend(value)
        elif name == "messages":
            message.messages.SetInParent()
            for role, content in value:
                message.messages.messages.add(role=role, content=content)
        elif name == "drafter":
            message.speculation.drafter.name = value
        elif name == "drafter_settings":
            for key, setting in value.items():
                message.speculation.drafter.settings[key] = setting
        elif name in pb.Speculation.DESCRIPTOR.fields_by_name:
            _set(message.speculation, name, value)
        else:
            _set(message.sampling, name, value)
    if message.WhichOneof("input") is None and "no_input" not in fields:
        message.prompt_ids.ids.extend([5, 6, 7])
    return message


def _set(message: Any, name: str, value: Any) -> None:
    if isinstance(value, list | tuple):
        getattr(message, name).extend(value)
    elif isinstance(value, dict):
        getattr(message, name).SetInParent()
        for key, each in value.items():
            _set(getattr(message, name), key, each)
    else:
        setattr(message, name, value)


def add_event(reply: Reply, event: pb.GenerateResponse) -> None:
    match event.WhichOneof("event"):
        case "start":
            reply.start = event.start
        case "prompt_logprobs":
            assert not reply.tokens
            told = enumerate(event.prompt_logprobs.logprobs, event.prompt_logprobs.first_position)
            reply.prompt += [(position, one.logprob, list(one.top_ids)) for position, one in told]
        case "tokens":
            reply.messages.append(event.tokens)
            reply.tokens += event.tokens.tokens
            reply.text += event.tokens.text
        case "finish":
            reply.finish = event.finish


GENERATE = "/betoken.v1.GenerationService/Generate"


def reply_of(connection: RawConnection, stream: int) -> Reply:
    """The received part of an answer."""
    reply = Reply()
    for message in connection.messages(stream):
        add_event(reply, pb.GenerateResponse.FromString(message))
    return reply


MakeCluster = Callable[..., Awaitable[Cluster]]


def router_settings(**values: Any) -> RouterSettings:
    """Settings with these values of options and constants."""
    constants = {name: values.pop(name) for name in list(values) if name in RouterSettings.__class_vars__}
    kind = type("RouterSettings", (RouterSettings,), constants)
    made: RouterSettings = kind(**values)
    return made


@asynccontextmanager
async def running_cluster(
    tokenizer: Tokenizer,
    *,
    num_verifiers: int = 1,
    num_drafters: int = 1,
    agreement: float = 0.7,
    model: FakeModel | None = None,
    verify_hellos: list[dict[str, Any]] | None = None,
    draft_hellos: list[dict[str, Any]] | None = None,
    step_s: float = 0.0,
    wait_ready: bool = True,
    **settings: Any,
) -> AsyncIterator[Cluster]:
    model = model or FakeModel(vocab_size=tokenizer.vocab_size)
    cluster = Cluster(tokenizer, model)
    for fields in verify_hellos or [{}] * num_verifiers:
        hello = verify_hello(model, tokenizer.hash)
        for name, value in fields.items():
            _set(hello, name, value)
        cluster.verifiers.append(FakeVerifyWorker(model, hello, step_s))
    for fields in draft_hellos or [{}] * num_drafters:
        hello = draft_hello(model, tokenizer.hash)
        for name, value in fields.items():
            _set(hello, name, value)
        cluster.drafters.append(FakeDraftWorker(model, hello, agreement))
    for worker in (*cluster.verifiers, *cluster.drafters):
        await worker.start()
    options = {
        "verify": tuple(worker.address for worker in cluster.verifiers),
        "draft": tuple(worker.address for worker in cluster.drafters),
        "tokenizer": "test",
        "draft_timeout_s": 0.3,
        "first_draft_timeout_s": 0.3,
        "min_probe_pause_s": 0.05,
        "failover_timeout_s": 5.0,
    } | settings
    router = cluster.router = Router(router_settings(**options), tokenizer, LINK_OPTIONS)
    scopes = RequestScopes(router)
    server = cluster.server = grpc.aio.server(
        interceptors=[KeysFirst(router.keys, scopes.refuse), TypedDecoding()], options=PING_OPTIONS
    )
    add_GenerationServiceServicer_to_server(GenerationServicer(router, scopes), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    cluster.address = f"127.0.0.1:{port}"
    cluster.channel = grpc.aio.insecure_channel(cluster.address)
    cluster.stub = GenerationServiceStub(cluster.channel)
    async with asyncio.TaskGroup() as tasks:
        links = tasks.create_task(router.run())
        try:
            if wait_ready:
                await cluster.until(lambda: all(worker.is_ready for worker in router.verify.workers))
                await cluster.until(lambda: all(worker.is_ready for worker in router.draft.workers))
            yield cluster
        finally:
            await cluster.channel.close()
            await server.stop(0.2)
            await router.close()
            links.cancel()
            for worker in (*cluster.verifiers, *cluster.drafters):
                await worker.kill()


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One id per byte, whatever merges there are."""
    vocab: dict[str, int] = json.loads(byte_tokenizer_json())["model"]["vocab"]
    return [vocab[character] for character in _byte_alphabet(data)]


def _byte_alphabet(data: bytes) -> list[str]:
    """The byte-level alphabet's characters (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    for index, byte in enumerate(byte for byte in range(256) if byte not in table):
        table[byte] = chr(256 + index)
    return [table[byte] for byte in data]


PROMPT = [9, 8, 7]


OPTIONS: dict[str, Any] = {"prompt_ids": PROMPT, "ignore_eos": True, "num_draft_tokens": 4}


async def generate_and(cluster: Cluster, num_new: int, after: int, act: Any, **options: Any) -> Reply:
    """Generate, and await `act()` when `after` tokens have arrived."""
    reply = Reply()
    acted = False
    usual = {name: value for name, value in OPTIONS.items() if name != "num_draft_tokens" or not options.get("off")}
    message = request(**(usual | {"max_new_tokens": num_new} | options))
    async for event in cluster.stub.Generate(message, timeout=60):
        add_event(reply, event)
        if len(reply.tokens) >= after and not acted:
            acted = True
            await act()
    assert acted
    return reply


async def generate_while_one_drains(cluster: Cluster, workers: Sequence[Any]) -> tuple[Reply, Any]:
    """Generate 300 tokens while the worker that serves them drains; return the reply and that worker."""
    draining: list[Any] = []

    async def drain() -> None:
        draining.append(next(worker for worker in workers if worker.num_open))
        await draining[0].drain()

    reply = await generate_and(cluster, 300, 10, drain)
    assert reply.ids == cluster.target_ids(300, PROMPT)
    return reply, draining[0]
