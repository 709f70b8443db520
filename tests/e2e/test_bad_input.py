"""Bad input is refused naming field, value and limit, and another stream never notices."""

import asyncio
import math
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from betoken.bench.stack import Stack
from betoken.client import InvalidArgumentError, NotFoundError
from betoken.v1 import generation_pb2, types_pb2, verify_pb2

pytestmark = pytest.mark.asyncio(loop_scope="session")

GENERATE = "/betoken.v1.GenerationService/Generate"
VERIFY_LINK = "/betoken.v1.VerifyService/Link"
PROMPT = "def f(x):\n    return"
BAD_REQUESTS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "empty prompt": ("", {"add_special_tokens": False}, "prompt"),
    "no ids": ([], {}, "prompt_ids.ids"),
    "id out of range": ([0, 1 << 20], {}, "prompt_ids.ids[1]"),
    "too long": ([1] * 100_000, {}, "prompt_ids.ids"),
    "no room for the answer": (PROMPT, {"max_new_tokens": 1 << 20}, "sampling.max_new_tokens"),
    "unknown drafter": (PROMPT, {"drafter": "oracle"}, "speculation.drafter.name"),
    "too many draft tokens": (PROMPT, {"num_draft_tokens": 10_000}, "speculation.num_draft_tokens"),
    "negative temperature": (PROMPT, {"temperature": -1.0}, "sampling.temperature"),
    "temperature beyond all": (PROMPT, {"temperature": 101.0}, "sampling.temperature"),
    "temperature NaN": (PROMPT, {"temperature": math.nan}, "sampling.temperature"),
    "top_p infinite": (PROMPT, {"top_p": math.inf}, "sampling.top_p"),
    "top_p zero": (PROMPT, {"top_p": 0.0}, "sampling.top_p"),
    "bias NaN": (PROMPT, {"logit_bias": {3: math.nan}}, "sampling.logit_bias"),
    "bias out of range": (PROMPT, {"logit_bias": {1 << 20: 1.0}}, "sampling.logit_bias"),
    "stop id out of range": (PROMPT, {"stop_token_ids": [1 << 20]}, "sampling.stop_token_ids"),
    "too many logprobs": (PROMPT, {"logprobs": 1000}, "sampling.logprobs"),
    "resume id out of range": (PROMPT, {"resume_ids": [1 << 20], "temperature": 0}, "resume_ids"),
}


class Undisturbed:
    """A stream that runs while the block does something bad; it must end with the tokens it has when alone."""

    _expected: tuple[int, ...] = ()

    def __init__(self, stack: Stack) -> None:
        self._stack = stack

    async def __aenter__(self) -> None:
        Undisturbed._expected = Undisturbed._expected or await self._answer(asyncio.Event())
        is_under_way = asyncio.Event()
        self._running = asyncio.ensure_future(self._answer(is_under_way))
        async with asyncio.timeout(60):
            await is_under_way.wait()

    async def __aexit__(self, *exception: object) -> None:
        assert await self._running == self._expected

    async def _answer(self, is_under_way: asyncio.Event) -> tuple[int, ...]:
        generation = self._stack.client.generate(
            "import os\n\ndef", max_new_tokens=96, temperature=0.8, seed=5, ignore_eos=True
        )
        async for _ in generation:
            is_under_way.set()
        return (await generation.result()).output_ids


async def test_bad_requests_are_rejected_by_name(stack: Stack) -> None:
    async with Undisturbed(stack):
        for prompt, options, field in BAD_REQUESTS.values():
            with pytest.raises(InvalidArgumentError, match=rf"^{re.escape(field)}.* = .+: .+"):
                await stack.client.complete(prompt, **options)


async def test_another_model_is_not_found(stack: Stack) -> None:
    with pytest.raises(NotFoundError, match="another"):
        await stack.client.complete(PROMPT, model="another")


async def raw_generate(stack: Stack, message: bytes) -> grpc.aio.AioRpcError:
    """The error of a Generate call with these bytes as its request."""
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(stack.services.address, unlimited) as channel:
        call = channel.unary_stream(GENERATE)(message, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    return caught.value


async def test_text_that_is_not_utf8_is_rejected(stack: Stack) -> None:
    valid = generation_pb2.GenerateRequest(prompt="ab").SerializeToString()
    async with Undisturbed(stack):
        error = await raw_generate(stack, valid.replace(b"ab", b"\xff\xfe"))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error


async def test_an_oversized_message_is_rejected(stack: Stack) -> None:
    message = generation_pb2.GenerateRequest(prompt="x" * (65 << 20)).SerializeToString()
    async with Undisturbed(stack):
        error = await raw_generate(stack, message)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error


def hello() -> bytes:
    router = types_pb2.RouterHello(protocol_version=1, router_id="intruder")
    return verify_pb2.VerifyLinkRequest(hello=router).SerializeToString()


def bad_open(sequence_id: int = 1) -> bytes:
    entry = types_pb2.OpenSequence(sequence_id=sequence_id, prompt_ids=[1 << 30], max_length=64)
    return verify_pb2.VerifyLinkRequest(opens=[entry]).SerializeToString()


@asynccontextmanager
async def link_of_our_own(stack: Stack) -> AsyncIterator[Any]:
    """To the verify worker; takes bytes."""
    async with grpc.aio.insecure_channel(stack.services.services["verify"].address) as channel:
        call = channel.stream_stream(VERIFY_LINK, response_deserializer=verify_pb2.VerifyLinkResponse.FromString)()
        async with asyncio.timeout(30):
            yield call
        call.cancel()


FRAMES: dict[str, Callable[[], list[bytes]]] = {
    "garbage first": lambda: [b"\xff" * 40],
    "garbage after the handshake": lambda: [hello(), b"\xff" * 40],
    "no handshake": lambda: [bad_open()],
}


@pytest.mark.parametrize("name", FRAMES)
async def test_garbage_on_a_link_ends_that_link_alone(stack: Stack, name: str) -> None:
    async with Undisturbed(stack), link_of_our_own(stack) as call:
        for frame in FRAMES[name]():
            await call.write(frame)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert ended.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION)
    assert await stack.all_pages_free()


async def test_a_bad_entry_on_a_link_ends_that_sequence_alone(stack: Stack) -> None:
    async with Undisturbed(stack), link_of_our_own(stack) as call:
        await call.write(hello())
        for sequence_id in (1, 2):  # the link itself goes on
            await call.write(bad_open(sequence_id))
            while not (errors := (await call.read()).errors):
                pass
            assert [error.sequence_id for error in errors] == [sequence_id]
            assert "prompt_ids" in errors[0].message
