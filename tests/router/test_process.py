"""The router as a process: options, refusals, ready file, drain on SIGTERM."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
import pytest

from betoken.router.text.tokenizer import Tokenizer
from betoken.v1.generation_pb2_grpc import GenerationServiceStub
from tests.router.harness import Reply, add_event, request
from tests.router.process import serving, start

# A router that reports the start of a large text and never finishes it.
TOKENIZING = """
import runpy, sys, time
from betoken.router.text.tokenizer import Tokenizer
def encode(self, text, **options):
    if len(text) > 1 << 15:
        print("tokenizing", flush=True)
        time.sleep(3600)
    return usual(self, text, **options)
usual, Tokenizer.encode = Tokenizer.encode, encode
runpy.run_module("betoken.router", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("arguments", "status", "named"),
    [
        (["--tokenizer", "x"], 2, "--verify"),
        (["--verify", "localhost", "--tokenizer", "x"], 2, "--verify"),
        (["--verify", "a:1,a:1", "--tokenizer", "x"], 2, "--verify"),
        (["--verify", "a:1", "--tokenizer", "x", "--max-queue", "-1"], 2, "--max-queue"),
        (["--verify", "a:1", "--tokenizer", "x", "--router-id", "\N{CRAB}" * 33], 2, "must be at most 128 bytes"),
        (["--verify", "a:1", "--port", "0", "--tokenizer", "/nowhere/at/all"], 1, "/nowhere/at/all"),
        (["--verify", "a:1", "--tokenizer", "x", "--fast-wake", "always"], 2, "--fast-wake"),
    ],
)
async def test_a_bad_option_of_the_router_stops_the_start_and_is_named(
    arguments: list[str], status: int, named: str
) -> None:
    process = await start(*arguments)
    _, stderr = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == status
    assert named in stderr.decode()


async def test_the_router_process_serves_and_drains_on_sigterm(tmp_path: Path, tokenizer: Tokenizer) -> None:
    async with serving(tmp_path, tokenizer) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            reply = Reply()
            call = GenerationServiceStub(channel).Generate(request(max_new_tokens=200, ignore_eos=True), timeout=120)
            is_asked = False
            async for event in call:
                add_event(reply, event)
                if len(reply.tokens) >= 5 and not is_asked:  # some come together; a second signal would hurry
                    is_asked = True
                    process.send_signal(signal.SIGTERM)
        assert len(reply.ids) == 200 and reply.finish.usage.output_tokens == 200
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_large_text_that_is_being_tokenized_does_not_hold_up_the_end(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    async with serving(tmp_path, tokenizer, program=("-c", TOKENIZING)) as (process, address):
        async with grpc.aio.insecure_channel(address) as channel:
            call = GenerationServiceStub(channel).Generate(request(prompt="the other one, " * 20_000))
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), 60) == b"tokenizing\n"
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 60) == 0
            call.cancel()
