"""A chat template has little memory and time, and whatever it does costs its own request alone."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from betoken.common.errors import InvalidArgumentError, from_rpc_error
from betoken.router.text import template_process
from betoken.router.text.chat import Chat
from betoken.router.text.chat_template import NUM_PROCESSES, ChatTemplate, TemplateError
from betoken.router.text.tokenizer import Tokenizer
from tests.router.harness import MakeCluster, byte_tokenizer_json
from tests.router.memory import Memory

USER = [{"role": "user", "content": "2"}]
HOSTILE = {
    "a-number-without-end": "{% set n = messages[0].content|int %}{{ ((8+n)**((8+n)**(8+n)))|string|length }}",
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{{ '' }}{% endfor %}{% endfor %}",
    "much-text": "{{ ('x' * (messages[0].content|int * 1500000000))|length }}",
    "much-output": "{{ 'x' * (messages[0].content|int * 20000000) }}",
    "depth": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.fixture(autouse=True)
def short_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_process, "MAX_CPU_S", 0.5)


@contextmanager
def bounded(own_growth: int = 64 << 20) -> Iterator[None]:
    """This process does not grow by what is rendered."""
    memory = Memory(os.getpid())
    yield
    assert memory.peak_growth < own_growth


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_template_that_takes_too_much_is_the_requests_fault(source: str) -> None:
    template = ChatTemplate("{% if messages[0].content == 'hi' %}ok{% else %}" + source + "{% endif %}", {})
    for _ in range(2):  # the process that was ended is replaced
        began_s = time.monotonic()
        with bounded(), pytest.raises(InvalidArgumentError, match="^messages = .*chat template"):
            template.render(Chat(USER))
        assert time.monotonic() - began_s < 10
        assert template.render(Chat([{"role": "user", "content": "hi"}])) == "ok"


@pytest.mark.parametrize(
    "source", ["{{ 'x' * 3000000000 }}", "{{ 9**(9**9) }}", "{% if %}"], ids=["much-text", "a-number", "syntax"]
)
def test_a_template_that_does_not_compile_in_its_bounds_is_refused(source: str) -> None:
    """Jinja computes constants when it compiles."""
    with bounded(), pytest.raises((TemplateError, InvalidArgumentError)):
        ChatTemplate(source, {}).render(Chat(USER))


def test_a_chat_of_many_long_messages_is_rendered() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content|trim }}|{% endfor %}{{ eos }}", {"eos": "\ud800"})
    chat = [{"role": "user", "content": "\N{CRAB}" * 128} for _ in range(15_000)]  # 8 MiB
    assert template.render(Chat(chat)) == ("\N{CRAB}" * 128 + "|") * 15_000 + "\ud800"


async def test_slow_chat_templates_block_no_prompt_and_little_else(make_cluster: MakeCluster) -> None:
    cluster = await make_cluster()
    source = "{% if messages[0].content != 'hi' %}" + HOSTILE["loops"] + "{% endif %}"
    cluster.router.tokenizer = Tokenizer(byte_tokenizer_json(), {}, source, "test")
    asking = [asyncio.ensure_future(cluster.generate(messages=[("user", "x")])) for _ in range(3 * NUM_PROCESSES)]
    await asyncio.sleep(0.1)
    began_s = time.monotonic()
    reply = await cluster.generate(prompt="the " * 1500, max_new_tokens=4, ignore_eos=True)
    assert len(reply.ids) == 4 and not any(call.done() for call in asking)
    took_s = time.monotonic() - began_s
    errors = await asyncio.gather(*asking, return_exceptions=True)
    assert took_s < 0.5 * (time.monotonic() - began_s), "it did not wait for the templates"
    for error in errors:
        assert isinstance(error, grpc.aio.AioRpcError)
        assert isinstance(from_rpc_error(error), InvalidArgumentError)
    await cluster.until_idle()


def test_template_processes_end_with_their_template() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    assert template.render(Chat(USER)) == "2"
    ids = [process._process.pid for process in template._processes._all]
    assert ids
    del template
    gc.collect()
    for process_id in ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_a_template_process_that_ends_between_two_chats_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}", {})
    for process in template._processes._all:
        process._process.kill()
        process._process.wait(60)
    assert template.render(Chat(USER)) == "2"
