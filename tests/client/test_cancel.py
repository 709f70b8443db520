"""Cancelling and closing: from the loop, other threads, other tasks, interrupts and at the exit."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

import grpc
import pytest

from betoken.client import (
    AsyncClient,
    Client,
    RequestCancelledError,
    RetryPolicy,
)
from tests.client.runners import FAST, swallowed

PATIENT = RetryPolicy(initial_backoff_s=120.0, max_backoff_s=120.0)


async def test_leaving_the_loop_cancels_the_call(router, script, runner) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    pieces = await runner.pieces(router.address, "hi", stop_after=1)
    assert [str(piece) for piece in pieces] == ["a"]
    gc.collect()
    assert await asyncio.to_thread(router.cancelled.wait, 30)


async def test_a_result_after_leaving_the_loop_raises_cancelled(router, script) -> None:
    for _ in range(2):
        router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        with Client(router.address) as blocking:
            answer, blocking_answer = (each.generate("hi") for each in (client, blocking))
            async for _ in answer:
                break
            await asyncio.to_thread(lambda: next(iter(blocking_answer)))
            with pytest.raises(RuntimeError, match="not whole: its iteration was left early"):
                await answer.result()
            with pytest.raises(RuntimeError, match="not whole: its iteration was left early"):
                blocking_answer.result()


def test_cancel_from_another_thread_ends_the_iteration(router, script) -> None:
    router.will(script.start(system_fingerprint="f"), script.tokens("a", 5), script.Hang())
    with Client(router.address) as client:
        generation = client.generate("hi")
        with pytest.raises(RequestCancelledError):
            for _ in generation:
                threading.Timer(0.05, generation.cancel).start()
    assert generation.seed == 7 and generation.request_id == "r1" and generation.prompt_ids == (1, 2, 3)
    assert generation.system_fingerprint == "f"


def test_a_cancel_while_the_call_begins_is_not_lost(router, script) -> None:
    router.will(script.start(), script.Hang())
    with Client(router.address, retry=FAST) as client:
        generation = client.generate("hi", timeout_s=60.0)

        class Stub:
            def Generate(self, *args: Any, **options: Any) -> Any:
                call = stub.Generate(*args, **options)
                while not router.requests:
                    time.sleep(0.001)
                generation.cancel()  # as another thread would, which cannot see this call yet
                return call

        stub, client.stub = client.stub, Stub()
        begun_s = time.monotonic()
        with pytest.raises(RequestCancelledError):
            list(generation)
        assert time.monotonic() - begun_s < 30.0  # not at its deadline


def test_closing_the_client_ends_the_iteration(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    client = Client(router.address)
    with pytest.raises(RequestCancelledError, match="closed"):
        for _ in client.generate("hi"):
            threading.Timer(0.05, client.close).start()
    with pytest.raises(RuntimeError, match="closed"):
        client.generate("hi")


async def once_asked(router: Any) -> None:
    """Return when the router has answered its first call, so that the client waits to ask again."""
    while not router.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)


def close_once_asked(client: Client, router: Any) -> None:
    while not router.requests:
        time.sleep(0.01)
    time.sleep(0.2)
    client.close()


def test_closing_the_client_ends_a_retry_wait(router, script) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = Client(router.address, retry=PATIENT)
    threading.Thread(target=close_once_asked, args=(client, router)).start()
    begun_s = time.monotonic()
    with pytest.raises(RequestCancelledError, match="closed"):
        client.complete("hi")
    assert time.monotonic() - begun_s < 30.0


async def test_closing_the_async_client_ends_a_retry_wait(router, script) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = AsyncClient(router.address, retry=PATIENT)
    answer = asyncio.ensure_future(client.complete("hi"))
    await once_asked(router)
    await client.close()
    async with asyncio.timeout(30.0):
        with pytest.raises(RequestCancelledError, match="closed"):
            await answer


def test_closing_the_client_ends_the_retry_wait_of_a_unary_call(router) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = Client(router.address, retry=PATIENT)
    threading.Thread(target=close_once_asked, args=(client, router)).start()
    with pytest.raises(RequestCancelledError, match="closed"):
        client.tokenize("hi")


async def test_closing_the_async_client_ends_the_retry_wait_of_a_unary_call(router) -> None:
    router.will(grpc.StatusCode.UNAVAILABLE)
    client = AsyncClient(router.address, retry=PATIENT)
    asking = asyncio.ensure_future(client.tokenize("hi"))
    await once_asked(router)
    await client.close()
    async with asyncio.timeout(30.0):
        with pytest.raises(RequestCancelledError, match="closed"):
            await asking


def test_a_client_closed_while_a_call_begins_raises_cancelled(router, script) -> None:
    client = Client(router.address, retry=FAST)
    generation = client.generate("hi")

    class Stub:
        def Generate(self, *args: Any, **options: Any) -> Any:
            client.close()  # as another thread would, after the check
            return stub.Generate(*args, **options)

    stub, client.stub = client.stub, Stub()
    with pytest.raises(RequestCancelledError, match="closed"):
        list(generation)


async def test_cancelling_the_task_cancels_the_call(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        arrived = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate("hi"):
                arrived.set()

        task = asyncio.create_task(read())
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(router.cancelled.wait, 30)


async def test_cancel_from_another_task_ends_the_iteration(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        generation = client.generate("hi")
        with pytest.raises(RequestCancelledError):
            async for _ in generation:
                asyncio.get_running_loop().call_later(0.05, generation.cancel)


@pytest.mark.parametrize("before_first", [True, False], ids=["before", "between"])
async def test_cancel_is_distinguished_from_a_cancellation_that_the_task_has_swallowed(
    router, script, before_first
) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:
        generation = client.generate("hi")
        if before_first:
            await swallowed()
        with pytest.raises(RequestCancelledError):
            async for _ in generation:
                await swallowed()
                asyncio.get_running_loop().call_later(0.05, generation.cancel)


async def test_closing_is_distinguished_from_a_cancellation_that_the_task_has_swallowed(router, script) -> None:
    router.will(script.Hang())
    await swallowed()
    client = AsyncClient(router.address)
    asyncio.get_running_loop().call_later(0.2, lambda: asyncio.ensure_future(client.close()))
    with pytest.raises(RequestCancelledError):
        await client.model_info()


async def test_a_task_that_cancels_itself_in_the_loop_is_cancelled(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    async with AsyncClient(router.address) as client:

        async def read() -> None:
            async for _ in client.generate("hi"):
                task = asyncio.current_task()
                assert task is not None
                task.cancel()

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(read())


def test_an_interrupted_client_takes_a_new_connection(router, script) -> None:
    """The interrupt may have left a lock of the old one taken, for ever."""
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    router.will(script.start(), script.tokens("b", 5), script.finish(1))
    with Client(router.address, retry=FAST) as client:
        pieces = iter(client.generate("hi"))
        next(pieces)
        stub = client.stub
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())
        assert client.stub is not stub
        assert client.complete("hi").text == "b"


def test_an_interrupt_while_a_call_begins_takes_a_new_connection(router, script) -> None:
    router.will(script.start(), script.tokens("b", 5), script.finish(1))
    with Client(router.address, retry=FAST) as client:

        class Stub:
            def Generate(self, *args: Any, **options: Any) -> Any:
                raise KeyboardInterrupt

        stub = client.stub = Stub()
        with pytest.raises(KeyboardInterrupt):
            client.complete("hi")
        assert client.stub is not stub
        assert client.complete("hi").text == "b"


def test_an_interrupt_is_one_where_grpc_has_let_go_of_its_lock(router, script, monkeypatch) -> None:
    """`threading.Condition.wait` lets go of the lock before the block that takes it again: between the two, an
    interrupt becomes the RuntimeError of a lock that is not held."""

    def interrupted(wait, *_: Any, **__: Any) -> None:
        wait.__self__._release_save()
        raise KeyboardInterrupt

    router.will(script.start(), script.tokens("a", 5), script.Hang())
    router.will(script.start(), script.tokens("b", 5), script.finish(1))
    with Client(router.address, retry=FAST) as client:
        pieces = iter(client.generate("hi"))
        next(pieces)
        stub = client.stub
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(grpc._common, "wait", interrupted)
            next(pieces)
        assert client.stub is not stub
        assert client.complete("hi").text == "b"


def test_an_interrupted_connection_is_not_closed_by_a_caller_that_timed_out(router, script) -> None:
    """gRPC closes a dropped channel, and waits for calls whose end the interrupt never reports."""
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    enders: list[threading.Thread] = []
    with Client(router.address, retry=FAST) as client:
        pieces = iter(client.generate("hi"))
        next(pieces)
        interrupted = weakref.ref(client._channel)
        close = client._channel.close
        client._channel.close = lambda: (enders.append(threading.current_thread()), close())
        with pytest.raises(KeyboardInterrupt):
            pieces.throw(KeyboardInterrupt())
        gc.collect()
        assert interrupted() is not None and not enders
    deadline_s = time.monotonic() + 30.0
    while not enders and time.monotonic() < deadline_s:
        time.sleep(0.01)
    (ender,) = enders
    assert ender is not threading.main_thread() and ender.daemon


def test_an_interpreter_exits_with_a_client_and_a_stream_open(router, script) -> None:
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    code = (
        "from betoken.client import Client\n"
        f"client = Client({router.address!r})\n"
        "pieces = iter(client.generate('hi'))\n"
        "print(next(pieces))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\n", "")


@pytest.mark.parametrize(
    ("deed", "printed"), [("print(client.complete('hi'), flush=True)", "b\n"), ("client.close()", "")]
)
def test_a_process_forked_off_beside_a_stream_takes_its_own_connection(router, script, deed, printed) -> None:
    """gRPC gives up the one it inherits, whose calls and end hung beyond their deadlines. Its fork handlers wait for
    threads in gRPC's code only if requested; elsewhere one fork in some hundreds aborts the new process."""
    router.will(script.start(), script.tokens("a", 5), script.Hang())
    if printed:
        router.will(script.start(), script.tokens("b", 5), script.finish(1))
    code = (
        "import os, signal\n"
        "from betoken.client import Client\n"
        f"client = Client({router.address!r}, timeout_s=60.0)\n"
        "pieces = iter(client.generate('hi'))\n"
        "print(next(pieces), flush=True)\n"
        "child = os.fork()\n"
        "if child:\n"
        "    assert os.waitpid(child, 0)[1] == 0\n"
        "else:\n"
        "    signal.alarm(60)\n"
        f"    {deed}\n"
    )
    env = os.environ | {"GRPC_ENABLE_FORK_SUPPORT": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=env)
    assert (done.returncode, done.stdout) == (0, f"a\n{printed}"), done.stderr
