"""Folders of compiled code whose content other users could replace are not used."""

import os
from pathlib import Path

import pytest

from betoken.kernels import build, code_folder, native
from betoken.kernels.file_trust import distrust, foreign_entry

OTHER = 12345


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "shared" / "cache"
    folder.mkdir(parents=True, mode=0o700)
    return folder


def test_a_private_folder_is_trusted_below_a_sticky_one(cache: Path) -> None:
    assert distrust(cache) == ""
    cache.parent.chmod(0o1777)
    assert distrust(cache) == "" and distrust(cache.parent).startswith("other users may write")


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o2777])
def test_a_folder_whose_parent_other_users_may_write_is_not_trusted(cache: Path, mode: int) -> None:
    cache.parent.chmod(mode)
    assert distrust(cache) == f"other users may write {cache.parent}, its mode is {mode:o}"


def test_a_folder_behind_a_link_in_a_shared_folder_is_not_trusted(cache: Path, tmp_path: Path) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / "cache").symlink_to(Path("..") / "shared" / "cache")
    assert distrust(links / "cache") == ""
    links.chmod(0o777)
    assert distrust(links / "cache").startswith(f"other users may write {links}")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_parent_or_a_file_of_another_user_is_not_trusted(cache: Path) -> None:
    (cache / "a.so").touch()
    assert foreign_entry(cache) is None
    os.chown(cache / "a.so", OTHER, OTHER)
    assert foreign_entry(cache) == cache / "a.so" and distrust(cache / "a.so").endswith(f"belongs to user {OTHER}")
    os.chown(cache.parent, OTHER, OTHER)
    assert distrust(cache) == f"{cache.parent} belongs to user {OTHER}"


def test_a_file_of_another_user_is_found_by_its_owner(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "a.so").touch()
    monkeypatch.setattr("betoken.kernels.file_trust._ROOT", -1)
    monkeypatch.setattr(os, "getuid", lambda: OTHER)
    assert foreign_entry(cache) == cache / "a.so" and "belongs to user" in distrust(cache)


def test_a_library_below_a_shared_folder_is_compiled_elsewhere(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\nfor made; do case "$last" in -o) echo made > "$made";; esac; last=$made; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(code_folder, "_temporary", None)
    assert build.build(native.LIBRARY, cache).parent == cache
    cache.parent.chmod(0o777)
    assert build.build(native.LIBRARY, cache).parent != cache
    assert f"not kept in {cache}: other users may write {cache.parent}" in caplog.text
