"""Callers are identified by their key alone, and a changed file applies without a restart."""

from __future__ import annotations

import asyncio
import hmac
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from betoken.common.errors import PermissionDeniedError, ResourceExhaustedError, UnauthenticatedError
from betoken.router.access import keys as keys_module
from betoken.router.access.keys import Keys
from tests.clock import Clock
from tests.router.access.key_files import ALICE, BOB, header, write


def test_without_a_file_everybody_is_served_and_tenants_are_what_they_say() -> None:
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
def test_whoever_shows_no_known_key_is_not_authenticated(tmp_path: Path, metadata: tuple[tuple[str, str], ...]) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {}}))
    with pytest.raises(UnauthenticatedError) as refused:
        keys.caller(metadata)
    assert ALICE not in str(refused.value)


def test_a_key_gives_its_tenant_and_no_other(tmp_path: Path) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {"tenant": "team"}, BOB: {}}))
    alice, bob = keys.caller(header(ALICE)), keys.caller((("authorization", f"bearer {BOB}"),))
    assert (alice.tenant_of(""), alice.tenant_of("team"), bob.tenant_of("")) == ("team", "team", BOB)
    with pytest.raises(PermissionDeniedError, match="team"):
        bob.tenant_of("team")


def test_every_known_hash_is_compared_whichever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: {}, BOB: {}, "third": {}}))
    compared: list[str] = []

    def compare(presented: str, known: str) -> bool:
        compared.append(known)
        return hmac.compare_digest(presented, known)

    monkeypatch.setattr(keys_module, "hmac", SimpleNamespace(compare_digest=compare))
    keys.caller(header(ALICE))
    keys.caller(header("third"))
    assert len(compared) == 6 and compared[:3] == compared[3:]


async def test_a_changed_file_holds_and_what_is_used_goes_on(
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
    keys.caller(header(ALICE)).charge(1000)
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
        with pytest.raises(UnauthenticatedError):
            keys.caller(header(BOB))
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
    alice.charge(650)  # an answer is not cut off
    with pytest.raises(ResourceExhaustedError, match=f"key {ALICE}: 600 tokens a minute") as refused:
        alice.check_tokens()
    assert refused.value.retry_after_s == pytest.approx(5.1, abs=0.5)  # 50 too many and one to have, of 10 a second
    clock.advance(refused.value.retry_after_s)
    alice.check_tokens()
    clock.advance(3600.0)
    alice.charge(600)  # no more than a minute's are saved up
    with pytest.raises(ResourceExhaustedError):
        alice.check_tokens()


def test_keys_of_a_tenant_share_its_tokens(tmp_path: Path) -> None:
    one, other = {"tenant": "team"}, {"tenant": "team", "tokens_per_minute": 1000}
    keys = Keys(write(tmp_path / "keys.toml", {ALICE: one, BOB: other}, {"team": {"tokens_per_minute": 100}}))
    keys.caller(header(ALICE)).charge(150)
    with pytest.raises(ResourceExhaustedError, match="tenant team: 100"):
        keys.caller(header(BOB)).check_tokens()
