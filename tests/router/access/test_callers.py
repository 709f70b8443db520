"""A router with keys, over real gRPC: which callers are served, what they may use, and what unknown callers see."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from betoken.client import AsyncClient, RetryPolicy
from betoken.common import names
from betoken.common.errors import (
    BetokenError,
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    from_rpc_error,
)
from betoken.router import scopes as scopes_module
from betoken.router.access import keys as keys_module
from betoken.router.metrics import RequestMetrics
from betoken.router.request_scope import RequestScope
from betoken.router.scopes import LineBudget
from betoken.v1 import generation_pb2 as pb
from tests.router.access.key_files import ALICE, BOB, header, write
from tests.router.harness import Cluster, MakeCluster, Reply, add_event, request

LONG: dict[str, Any] = {"prompt_ids": [9, 8, 7], "ignore_eos": True, "max_new_tokens": 1500, "off": True}


async def ask(cluster: Cluster, key: str | None, **fields: Any) -> Reply:
    reply = Reply()
    call = cluster.stub.Generate(request(**fields), timeout=60, metadata=header(key) if key else ())
    async for event in call:
        add_event(reply, event)
    return reply


async def refusal(awaitable: Any) -> BetokenError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await awaitable
    return from_rpc_error(failed.value)


async def test_with_its_key_a_client_is_served_and_without_one_is_not(
    make_cluster: MakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "betoken.router.request_scope")
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {"tenant": "team"}}))
    reply = await ask(cluster, ALICE, prompt_ids=[5, 6, 7], temperature=0, max_new_tokens=12, ignore_eos=True)
    assert reply.ids == cluster.target_ids(12, [5, 6, 7], temperature=0.0)
    assert vars(caplog.records[-1])["fields"]["tenant"] == "team"
    for key in (None, BOB):
        assert isinstance(await refusal(ask(cluster, key)), UnauthenticatedError)
    for method, message in (
        ("Tokenize", pb.TokenizeRequest(prompt="a")),
        ("Detokenize", pb.DetokenizeRequest(ids=[5])),
    ):
        call = getattr(cluster.stub, method)
        assert isinstance(await refusal(call(message, timeout=10)), UnauthenticatedError)
        await call(message, timeout=10, metadata=header(ALICE))
    assert isinstance(await refusal(ask(cluster, ALICE, tenant="other")), PermissionDeniedError)
    await cluster.until_idle()


async def test_an_unknown_caller_is_rejected_before_its_message_is_read(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}}))
    prefix = "/betoken.v1.GenerationService"
    for method in ("Generate", "Tokenize", "NoSuchMethod"):  # as a stream of requests that never comes
        call = cluster.channel.stream_stream(f"{prefix}/{method}")(timeout=10)
        assert isinstance(await refusal(call.read()), UnauthenticatedError)


async def test_rejections_of_unknown_callers_reach_the_log_and_the_metrics(
    make_cluster: MakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "betoken.router.request_scope")
    scopes: list[RequestScope] = []
    monkeypatch.setattr(RequestMetrics, "refused", lambda _, scope: scopes.append(scope))
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}}))
    ids = []
    for key, method in ((None, "Generate"), (BOB, "Tokenize"), (BOB, "secret" * 50)):
        metadata = header(key) if key else ()
        path = f"/betoken.v1.GenerationService/{method}"
        call = cluster.channel.stream_stream(path)(timeout=10, metadata=metadata)
        ids.append((await refusal(call.read())).request_id)
    lines = [vars(record)["fields"] for record in caplog.records]
    assert [line["request_id"] for line in lines] == ids and all(ids)
    assert {line["status"] for line in lines} == {scope.status for scope in scopes} == {"UNAUTHENTICATED"}
    assert [line["method"] for line in lines] == ["Generate", "Tokenize", names.OTHER]
    assert "needs an API key" in lines[0]["error"] and lines[1]["error"] == "the API key is not known here"
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in lines)
    assert "secret" not in str(lines) and len(scopes) == 3


async def test_a_flood_of_unknown_callers_has_few_log_lines_and_is_counted_whole(
    make_cluster: MakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "betoken.router.request_scope")
    num_counted = 0

    def count(*_: Any) -> None:
        nonlocal num_counted
        num_counted += 1

    monkeypatch.setattr(RequestMetrics, "refused", count)
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}}))
    for _ in range(3 * scopes_module._MAX_LINES):
        assert isinstance(await refusal(ask(cluster, BOB)), UnauthenticatedError)
    assert len(caplog.records) == scopes_module._MAX_LINES
    assert num_counted == 3 * scopes_module._MAX_LINES


def test_suppressed_log_lines_are_counted_in_the_next_period() -> None:
    now_s = 0.0
    lines = LineBudget(2, 60.0, lambda: now_s)
    assert [lines.take() for _ in range(5)] == [True, True, False, False, False]
    now_s = 61.0
    assert lines.take() and lines.pop_untold() == 3
    assert lines.take() and lines.pop_untold() == 0


async def test_the_sdk_sends_its_key(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}}))
    monkeypatch.setenv("BETOKEN_API_KEY", ALICE)
    async with AsyncClient(cluster.address, retry=RetryPolicy(max_retries=0)) as client:
        assert len(await client.tokenize("abc")) > 0
    async with AsyncClient(cluster.address, api_key=BOB, retry=RetryPolicy(max_retries=0)) as client:
        with pytest.raises(UnauthenticatedError, match="API key"):
            await client.tokenize("abc")
        assert len(await client.tokenize("abc", headers={"authorization": f"Bearer {ALICE}"})) > 0


async def test_limits_of_a_key_are_kept_with_advice_and_others_do_not_notice(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    limits = {"max_streams": 1, "max_queue": 1}
    cluster = await make_cluster(step_s=0.002, api_keys_file=write(tmp_path / "keys.toml", {ALICE: limits, BOB: {}}))
    calls = [cluster.stub.Generate(request(**LONG), metadata=header(ALICE))]
    await calls[0].read()
    calls.append(cluster.stub.Generate(request(**LONG), metadata=header(ALICE)))
    admission = cluster.router.admission
    await cluster.until(lambda: admission.num_waiting == 1)
    error = await refusal(ask(cluster, ALICE))
    assert isinstance(error, ResourceExhaustedError) and f"key {ALICE}" in str(error)
    assert error.retry_after_s is not None and error.retry_after_s > 0
    assert (await ask(cluster, BOB, max_new_tokens=4, ignore_eos=True)).finish.usage.output_tokens == 4
    assert (admission.num_running, admission.num_waiting) == (1, 1)
    calls[0].cancel()
    await calls[1].read()  # its turn has come
    calls[1].cancel()
    await cluster.until_idle()
    accounts = cluster.router.keys.caller(header(ALICE)).accounts
    assert [(account.num_running, account.num_waiting) for account in accounts] == [(0, 0), (0, 0)]


async def test_tokens_of_prompt_and_answer_are_counted(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {"tokens_per_minute": 10}}))
    await ask(cluster, ALICE, prompt_ids=[5, 6, 7], max_new_tokens=12, ignore_eos=True)
    error = await refusal(ask(cluster, ALICE))
    assert isinstance(error, ResourceExhaustedError) and "10 tokens a minute" in str(error)
    assert error.retry_after_s is not None and 20 < error.retry_after_s <= 36  # 5 too many, and one to have


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt": "\N{EURO SIGN}" * 7}, "prompt"),
        ({"prompt_ids": [5] * 6}, "prompt_ids.ids"),
        ({"messages": [("user", "x" * 20)]}, "messages"),
    ],
)
async def test_a_prompt_beyond_the_keys_bytes_is_refused(
    make_cluster: MakeCluster, tmp_path: Path, fields: dict[str, Any], named: str
) -> None:
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {"max_prompt_bytes": 20}}))
    error = await refusal(ask(cluster, ALICE, **fields))
    assert isinstance(error, InvalidArgumentError)
    assert (error.field, error.limit) == (named, f"must be at most 20 bytes for key {ALICE}")
    await ask(cluster, ALICE, prompt="\N{EURO SIGN}" * 6, max_new_tokens=1)


async def test_queue_turns_are_shared_between_tenants(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = await make_cluster(
        step_s=0.001, max_concurrency=1, api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}, BOB: {}})
    )
    ended: list[str] = []

    async def take_turn(key: str) -> None:
        await ask(cluster, key, max_new_tokens=8, ignore_eos=True, off=True)
        ended.append(key)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(6):
            tasks.create_task(take_turn(ALICE))
        await cluster.until(lambda: cluster.router.admission.num_waiting == 5)
        for _ in range(2):
            tasks.create_task(take_turn(BOB))
    assert ended.index(BOB) <= 2
    assert [place for place, key in enumerate(ended) if key == BOB][1] <= 4


async def test_unknown_callers_see_no_addresses(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = await make_cluster(api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}}))
    addresses = [worker.address for worker in (*cluster.verifiers, *cluster.drafters)]
    told = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10, metadata=header(ALICE))
    assert [worker.address for worker in (*told.verify_workers, *told.draft_workers)] == addresses
    info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
    assert info.model == told.model
    for worker in (*info.verify_workers, *info.draft_workers):
        assert (worker.state, worker.address, worker.hello.worker_id) == ("ready", "", "")
    error = await refusal(cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10, metadata=header(BOB)))
    assert isinstance(error, UnauthenticatedError)


async def test_errors_report_addresses_to_those_with_a_key_only(make_cluster: MakeCluster, tmp_path: Path) -> None:
    cluster = await make_cluster(
        api_keys_file=write(tmp_path / "keys.toml", {ALICE: {}}),
        num_drafters=0,
        verify_hellos=[{"tokenizer_hash": "another"}],
        wait_ready=False,
        ready_timeout_s=0.3,
    )
    for metadata, is_told in ((header(ALICE), True), ((), False)):
        error = await refusal(cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=20, metadata=metadata))
        assert isinstance(error, UnavailableError) and "no verify worker became ready" in str(error)
        assert (cluster.verifiers[0].address in str(error)) == is_told
        assert ("tokenizers differ" in str(error)) == is_told


async def test_without_keys_another_machine_is_reported_no_addresses(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = await make_cluster()
    for is_own in (True, False):
        monkeypatch.setattr(keys_module, "is_own_peer", lambda peer, is_own=is_own: is_own)
        info = await cluster.stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=10)
        workers = (*info.verify_workers, *info.draft_workers)
        assert [bool(worker.address) for worker in workers] == [is_own] * 2


async def test_requests_at_once_take_no_more_tokens_than_a_key_has(make_cluster: MakeCluster, tmp_path: Path) -> None:
    path = write(tmp_path / "keys.toml", {ALICE: {"tokens_per_minute": 60}})
    cluster = await make_cluster(api_keys_file=path)
    fields: dict[str, Any] = {"prompt_ids": [5, 6, 7], "ignore_eos": True, "max_new_tokens": 40}
    replies = await asyncio.gather(*(ask(cluster, ALICE, **fields) for _ in range(40)), return_exceptions=True)
    assert sum(len(reply.ids) for reply in replies if isinstance(reply, Reply)) == 40
    assert all("tokens a minute" in str(reply) for reply in replies if not isinstance(reply, Reply))


async def test_n_above_what_a_key_may_run_and_queue_is_an_invalid_argument(
    make_cluster: MakeCluster, tmp_path: Path
) -> None:
    path = write(tmp_path / "keys.toml", {ALICE: {"max_streams": 1, "max_queue": 1}})
    cluster = await make_cluster(api_keys_file=path)
    assert isinstance(await refusal(ask(cluster, ALICE, prompt_ids=[5], n=3)), InvalidArgumentError)
