"""Compiled code: compiled once by concurrent processes, kept if there is room, no files left by killed ones."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from betoken.kernels import build, code_folder, cpu, native
from tests.pipes import line_of

COMPILER = """#!/bin/sh
for made; do case "$last" in -o) echo "$made" >> "$LOG"; sleep 0.5; echo made > "$made";; esac; last=$made; done
"""
"""Answers questions with nothing and, asked to compile, says so in $LOG and takes its time."""


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The log of a fake compiler."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_processes_that_start_together_compile_the_code_once(compiled: Path, tmp_path: Path) -> None:
    code = "import pathlib, sys; from betoken.kernels import build, native\n"
    code += "print('ready', flush=True); sys.stdin.read()\n"
    code += "print(build.build(native.LIBRARY, pathlib.Path(sys.argv[1])).read_text())"
    command = [sys.executable, "-c", code, str(tmp_path / "cache")]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [line_of(process.stdout) for process in started] == ["ready\n"] * 3  # so that all come at once
    for process in started:
        process.stdin.close()
    assert [process.stdout.read().strip() for process in started] == ["made"] * 3
    assert [process.wait(60) for process in started] == [0] * 3
    assert len(compiled.read_text().splitlines()) == 1


def test_a_process_that_waits_for_a_compilation_logs_it_and_finds_the_code(
    compiled: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    paths: list[Path] = []
    builders = [Thread(target=lambda: paths.append(build.build(native.LIBRARY, tmp_path / "cache"))) for _ in "ab"]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    assert paths[0] == paths[1] and len(compiled.read_text().splitlines()) == 1
    assert caplog.text.count("waiting for another process") == 1


def test_files_of_a_killed_compilation_are_removed_by_the_next(compiled: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    left = cache / f"building-{native.LIBRARY.name}-0123"
    left.mkdir(mode=0o700, parents=True)
    cache.chmod(0o700)
    (left / "half.so").touch()
    path = build.build(native.LIBRARY, cache)
    assert path.parent == cache and [entry for entry in cache.iterdir() if entry.is_dir()] == []


def test_a_compiler_keeps_its_own_files_where_ours_are_removed(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Path(os.environ["CC"])
    compiler.write_text(COMPILER.replace("echo made", 'touch "$TMPDIR/left"; echo made'))
    monkeypatch.setattr(code_folder.tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    build.build(native.LIBRARY, tmp_path / "cache")
    assert not list(tmp_path.rglob("left"))


def test_a_cache_on_a_full_disk_gives_way_to_a_temporary_folder(
    compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reserve = os.posix_fallocate

    def full(descriptor: int, offset: int, length: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(tmp_path / "cache")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(descriptor, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full)
    path = build.build(native.LIBRARY, tmp_path / "cache")
    assert path.read_text() == "made\n" and not path.is_relative_to(tmp_path / "cache")
    assert f"not kept in {tmp_path / 'cache'}" in caplog.text and "No space left" in caplog.text
    monkeypatch.setattr(os, "posix_fallocate", reserve)
    kept = build.build(native.LIBRARY, tmp_path / "cache")
    monkeypatch.setattr(os, "posix_fallocate", full)
    assert build.build(native.LIBRARY, tmp_path / "cache") == kept, "what is there needs no room"


def test_no_library_sweeps_the_scratch_folders_of_another() -> None:
    prefixes = [build._scratch_prefix(library) for library in (cpu.LIBRARY, cpu.GROUPED_LIBRARY, native.LIBRARY)]
    for prefix in prefixes:
        assert [other for other in prefixes if other.startswith(prefix)] == [prefix]
