"""Every failure of a handler ends the call with a status, panics of foreign libraries included, and frees its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
import pytest
from tokenizers import Regex, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from betoken.common.errors import InternalError, InvalidArgumentError, from_rpc_error
from betoken.router.text.tokenizer import Tokenizer
from betoken.v1 import generation_pb2 as pb
from tests.router.harness import CHAT_TEMPLATE, MakeCluster, byte_tokenizer_json

TOO_HARD = "x" * 30


def panicking_tokenizer_json() -> str:
    """A tokenizer whose regular expression needs more steps than its library takes for `TOO_HARD`; it panics then."""
    fast = FastTokenizer.from_str(byte_tokenizer_json())
    hard = pre_tokenizers.Split(Regex("(x+x+)+y"), "isolated")
    fast.pre_tokenizer = pre_tokenizers.Sequence([hard, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return fast.to_str()


@pytest.mark.parametrize("num_chars", [0, 5000], ids=["here", "on-a-thread"])
async def test_a_text_at_which_the_tokenizer_panics_is_refused(make_cluster: MakeCluster, num_chars: int) -> None:
    cluster = await make_cluster(verify_hellos=[{"max_context": 10_000}])
    cluster.router.tokenizer = Tokenizer(panicking_tokenizer_json(), {}, CHAT_TEMPLATE, "test")
    text = "." * num_chars + TOO_HARD
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content=text)])
    calls = {
        "prompt": lambda: cluster.generate(prompt=text, deadline_s=30),
        "messages": lambda: cluster.generate(messages=[("user", text)], deadline_s=30),
        "prompt of Tokenize": lambda: cluster.stub.Tokenize(pb.TokenizeRequest(prompt=text), timeout=30),
        "messages of Tokenize": lambda: cluster.stub.Tokenize(pb.TokenizeRequest(messages=chat), timeout=30),
    }
    for name, call in calls.items():
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call()
        error = from_rpc_error(failed.value)
        assert isinstance(error, InvalidArgumentError) and error.field == name.split()[0], error
    assert len((await cluster.generate(prompt="xxy", max_new_tokens=3, ignore_eos=True)).ids) == 3
    await cluster.until_idle()
    assert cluster.router.waiting_bytes.num_bytes == 0


class Panic(BaseException):
    """Like pyo3's, which cannot be constructed."""


class PanickingDecoder(Tokenizer):
    """Fails at text of ids."""

    def decode(self, ids: Sequence[int]) -> str:
        raise Panic

    def piece(self, token_id: int) -> str:
        raise Panic


@pytest.mark.parametrize("fields", [{}, {"stop": ["x"]}, {"resume_ids": [5, 6]}, {"off": True}])
async def test_a_panic_within_an_answer_is_internal(make_cluster: MakeCluster, fields: dict[str, Any]) -> None:
    cluster = await make_cluster()
    cluster.router.tokenizer = PanickingDecoder(byte_tokenizer_json(), {}, CHAT_TEMPLATE, "test")
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await cluster.generate(max_new_tokens=5, ignore_eos=True, deadline_s=30, **fields)
    error = from_rpc_error(failed.value)
    assert isinstance(error, InternalError) and error.request_id
    await cluster.until_idle()
    assert cluster.router.admission.num_running == 0
