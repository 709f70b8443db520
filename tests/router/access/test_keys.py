"""Callers are identified by their key alone, and a changed file applies without a restart."""

from __future__ import annotations

import asyncio
import hmac
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from betoken.common.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnauthenticatedError,
)
from betoken.router.access import keys as keys_module
from betoken.router.access.keys import Keys
from tests.clock import Clock
from tests.router.access.key_files import ALICE, BOB, header, write


def test_without_a_key_file_all_callers_are_served_with_their_named_tenant() -> None:
    caller = Keys(None).caller(header("anything"))
    assert caller.tenant_of("me") == "me"
    assert caller.accounts == ()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        None,
        (("authorization", ""),),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        (("authorization", "Bearer "),),
        (("authorization", b"Bearer \xff"),),
        header(ALICE) + header(ALICE),
        header(ALICE + "x"),
        header(ALICE[:-1]),
        header(ALICE.upper()),
    ],
)
def test_a_caller_without_a_known_key_is_not_authenticated(
    tmp_path: Path, metadata: tuple[tuple[str, str], ...]
) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {}}))
    with pytest.raises(UnauthenticatedError, match="API key|`authorization` must be given once") as refused:
        keys.caller(metadata)
    assert ALICE not in str(refused.value)


def test_a_key_gives_its_tenant_and_no_other(tmp_path: Path) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {"tenant": "team"}, BOB: {}}))
    alice, bob = keys.caller(header(ALICE)), keys.caller((("authorization", f"bearer {BOB}"),))
    assert (alice.tenant_of(""), alice.tenant_of("team"), bob.tenant_of("")) == ("team", "team", BOB)
    with pytest.raises(PermissionDeniedError, match="team"):
        bob.tenant_of("team")


def test_every_known_key_hash_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {}, BOB: {}, "third": {}}))
    compared: list[str] = []

    def compare(presented: str, known: str) -> bool:
        compared.append(known)
        return hmac.compare_digest(presented, known)

    monkeypatch.setattr(keys_module, "hmac", SimpleNamespace(compare_digest=compare))
    keys.caller(header(ALICE))
    keys.caller(header("third"))
    assert len(compared) == 6 and compared[:3] == compared[3:]


async def test_a_changed_key_file_applies_and_used_limits_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(keys_module, "_READ_PERIOD_S", 0.005)
    path = write(tmp_path / "keys.toml", {ALICE: {"tokens_per_minute": 100}})
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    keys = Keys(path, changed)
    keys.caller(header(ALICE)).reserve(1000)
    following = asyncio.ensure_future(keys.run())
    try:
        write(path, {ALICE: {"tokens_per_minute": 200}, BOB: {}})
        await _until(lambda: changes == 1)
        keys.caller(header(BOB)).check_tokens()
        with pytest.raises(ResourceExhaustedError, match="200 tokens a minute"):
            keys.caller(header(ALICE)).check_tokens()
        path.write_text("[[keys")
        await _until(lambda: "at hand stay" in caplog.text)
        keys.caller(header(BOB))
        path.unlink()
        await _until(lambda: "cannot be read" in caplog.text)
        keys.caller(header(BOB))
        write(path, {ALICE: {}})
        await _until(lambda: changes == 2)
        with pytest.raises(UnauthenticatedError, match="API key"):
            keys.caller(header(BOB))
    finally:
        following.cancel()


async def test_a_key_that_is_removed_is_gone_though_its_tenant_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "_READ_PERIOD_S", 0.005)
    limits = {"team": {"max_streams": 1}}
    path = write(tmp_path / "keys.toml", {ALICE: {"tenant": "team"}, BOB: {}}, limits)
    changes: list[None] = []
    keys = Keys(path, lambda: changes.append(None))
    following = asyncio.ensure_future(keys.run())
    try:
        write(path, {BOB: {}}, limits)
        await _until(lambda: changes)
        with pytest.raises(UnauthenticatedError, match="API key"):
            keys.caller(header(ALICE))
    finally:
        following.cancel()


@pytest.mark.parametrize("text", ["a=" + "[" * 100_000, "a" * 2000, "\x00", "keys = [1]", "[[keys]]\nname = 1e400"])
async def test_no_content_of_a_key_file_ends_the_watching_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(keys_module, "_READ_PERIOD_S", 0.005)
    path = write(tmp_path / "keys.toml", {ALICE: {}})
    keys = Keys(path)
    following = asyncio.ensure_future(keys.run())
    try:
        path.write_text(text)
        await _until(lambda: keys.num_rejected_files or following.done())
        keys.caller(header(ALICE))
        write(path, {BOB: {}})
        await _until(lambda: len(keys._callers) and keys._key_accounts.keys() == {BOB} or following.done())
        assert not following.done()
    finally:
        following.cancel()


async def _until(condition) -> None:  # type: ignore[no-untyped-def]
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_tokens_come_back_with_time_and_advice_says_when(tmp_path: Path, clock: Clock) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {"tokens_per_minute": 600}}))
    alice = keys.caller(header(ALICE))
    alice.check_tokens()
    alice.reserve(650)  # an answer is not cut off
    with pytest.raises(ResourceExhaustedError, match=f"key {ALICE}: 600 tokens a minute") as refused:
        alice.check_tokens()
    assert refused.value.retry_after_s == pytest.approx(5.1, abs=0.5)  # 50 too many and one to have, of 10 a second
    clock.advance(refused.value.retry_after_s)
    alice.check_tokens()
    clock.advance(3600.0)
    alice.reserve(600)  # no more than a minute's are saved up
    with pytest.raises(ResourceExhaustedError, match="tokens a minute"):
        alice.check_tokens()


def test_keys_of_a_tenant_share_its_tokens(tmp_path: Path) -> None:
    one, other = {"tenant": "team"}, {"tenant": "team", "tokens_per_minute": 1000}
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: one, BOB: other}, {"team": {"tokens_per_minute": 100}}))
    keys.caller(header(ALICE)).reserve(150)
    with pytest.raises(ResourceExhaustedError, match="tenant team: 100"):
        keys.caller(header(BOB)).check_tokens()


def test_tokens_are_reserved_and_what_was_not_used_is_given_back(tmp_path: Path, clock: Clock) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {"tokens_per_minute": 600}}))
    alice = keys.caller(header(ALICE))
    with alice.reserve(400) as reserved:
        with pytest.raises(ResourceExhaustedError, match="tokens a minute") as refused:
            alice.reserve(300)
        assert refused.value.retry_after_s == pytest.approx(10.0, abs=0.5)
        reserved.use(50)
    with alice.reserve(550), pytest.raises(ResourceExhaustedError, match="tokens a minute"):
        alice.reserve(1)
    with alice.reserve(540):
        pass


def test_tokens_of_a_request_beyond_a_minutes_need_a_whole_minute(tmp_path: Path, clock: Clock) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {"tokens_per_minute": 60}}))
    alice = keys.caller(header(ALICE))
    with alice.reserve(260) as reserved:
        for _ in range(39):
            with pytest.raises(ResourceExhaustedError, match="tokens a minute"):
                alice.reserve(260)
        reserved.use(70)
    with pytest.raises(ResourceExhaustedError, match="tokens a minute"):
        alice.reserve(1)
    clock.advance(11.0)
    alice.check_tokens()


def test_tokens_that_the_tenant_lacks_are_not_taken_from_the_key(tmp_path: Path, clock: Clock) -> None:
    fields = {"tenant": "team", "tokens_per_minute": 100}
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: fields}, {"team": {"tokens_per_minute": 50}}))
    alice = keys.caller(header(ALICE))
    with alice.reserve(50), pytest.raises(ResourceExhaustedError, match="tenant team"):
        alice.reserve(10)
    assert [account.limits.tokens_per_minute for account in alice.accounts] == [100, 50]
    alice.accounts[0].check_tokens(100)


def test_answers_that_never_run_at_once_are_an_invalid_argument(tmp_path: Path) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {"max_streams": 2, "max_queue": 1}}))
    keys.caller(header(ALICE)).check_answers(3)
    with pytest.raises(InvalidArgumentError, match="n = 4: must be at most 3 for key"):
        keys.caller(header(ALICE)).check_answers(4)
