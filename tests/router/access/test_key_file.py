"""A file of keys is taken whole or refused by name, and no refusal quotes a hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from betoken.common.api_key import hash_of, new_api_key
from betoken.common.errors import FailedPreconditionError
from betoken.router.access import check_keys, key_file
from betoken.router.access.key_file import read_key_file
from betoken.router.policy.account import Limits

HASH = hash_of("one")
ONE = f'[[keys]]\nname = "one"\nhash = "{HASH}"\n'


def test_a_key_has_its_own_limits_and_its_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'{ONE}tenant = "team"\nmax_streams = 2\n[tenants.team]\ntokens_per_minute = 60\n')
    file = read_key_file(path)
    (key,) = file.keys
    assert (key.tenant_name, key.limits()) == ("team", Limits(max_streams=2))
    assert file.tenants["team"].limits() == Limits(tokens_per_minute=60)


def test_a_key_without_a_tenant_is_its_own(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ONE)
    assert read_key_file(path).keys[0].tenant_name == "one"


def test_an_empty_key_file_admits_no_caller_and_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text("")
    assert read_key_file(path).keys == ()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[keys", "not TOML"),
        (ONE + "max_stream = 1\n", "max_stream"),
        (ONE + "max_streams = 0\n", "max_streams"),
        (ONE + "tokens_per_minute = 1.5\n", "tokens_per_minute"),
        (ONE.replace("sha256:", "md5:"), "hash"),
        (ONE.replace('"one"', '""'), "name"),
        (ONE.replace('"one"', '"o\\u001bne"'), "name"),
        (ONE + ONE.replace('"one"', '"two"'), "one and two have the same hash"),
        (ONE + ONE.replace(HASH, hash_of("two")), "the same name"),
        ("a=" + "[" * 100_000, "nested too deeply"),
        ("a=" + "{b=" * 50_000, "nested too deeply"),
        ("keys = 3", "keys"),
    ],
)
def test_an_invalid_key_file_is_rejected_by_name(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    with pytest.raises(FailedPreconditionError, match="keys.toml") as refused:
        read_key_file(path)
    assert named in str(refused.value)
    assert HASH.removeprefix("sha256:") not in str(refused.value)


def test_a_key_file_that_is_missing_not_text_or_too_large_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    with pytest.raises(FailedPreconditionError, match="No such file"):
        read_key_file(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(FailedPreconditionError, match="not TOML"):
        read_key_file(path)
    monkeypatch.setattr(key_file, "MAX_FILE_BYTES", 1)
    with pytest.raises(FailedPreconditionError, match="2 bytes, must be at most 1"):
        read_key_file(path)


def test_keys_are_long_and_never_the_same() -> None:
    keys = {new_api_key() for _ in range(100)}
    assert len(keys) == 100 and all(len(key) >= 43 for key in keys)


def test_a_key_file_may_have_tenants_without_keys_and_warns_of_them(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ONE + "[tenants.unused]\nmax_streams = 1\n")
    assert read_key_file(path).warnings() == ["tenants.unused: no key has this tenant"]


def test_a_key_file_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FailedPreconditionError, match="not a file"):
        read_key_file(Path("/dev/null"))


def test_check_keys_reports_tenants_warnings_and_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(ONE + "[tenants.unused]\nmax_streams = 1\n")
    assert check_keys.main([str(path)]) == 0
    shown = capsys.readouterr()
    assert "tenant one: one" in shown.out and "tenants.unused" in shown.err and HASH not in shown.out
    path.write_text("a=" + "[" * 100_000)
    assert check_keys.main([str(path)]) == 1 and "nested" in capsys.readouterr().err
