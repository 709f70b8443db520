"""Packed weights and compiled forwards of an earlier start: the same bits, without packing or tracing again."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from betoken.engine.bring_up import kept, packed_file, passed_check
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.cpu import compiled
from betoken.engine.runner import ModelRunner
from betoken.kernels.cpu.grouped import PackedWeight
from tests.engine.gguf_files import tiny_model, write_gguf

SEQUENCES = [[1, 2, 3, 4, 5], list(range(30, 60))]
Start = Callable[..., tuple[ModelRunner, int]]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Loads a file; returns the runner and how many weights it packed."""
    num_packed = [0]
    pack = PackedWeight.of

    def counted(weight: Any) -> PackedWeight:
        num_packed[0] += 1
        return pack(weight)

    def start(path: str, **settings: Any) -> tuple[ModelRunner, int]:
        num_packed[0] = 0
        options: dict[str, Any] = {"num_pages": 32, "compile": "off", "reuse_self_check": True} | settings
        return load_runner(EngineConfig(path, **options)), num_packed[0]

    monkeypatch.setattr(PackedWeight, "of", counted)
    monkeypatch.setattr(packed_file, "_LEAST_BYTES", 0)
    for module in (kept, packed_file, passed_check):
        monkeypatch.setattr(module, "user_cache_dir", lambda: tmp_path / "cache")
    return start


def packed_of(runner: ModelRunner) -> dict[str, torch.Tensor]:
    """Packed weights by the path of their layer."""
    model: Any = runner.parts._model
    return {path: layer.packed for path, layer in model.named_modules() if hasattr(layer, "packed")}


def the_file(tmp_path: Path) -> Path:
    (file,) = (tmp_path / "cache" / "packed").iterdir()
    return file


@pytest.mark.parametrize(("type_name", "is_tied"), [("Q4_K", True), ("Q6_K", False), ("Q8_0", False)])
def test_packed_weights_of_an_earlier_start_are_the_same_bytes(
    start: Start, tmp_path: Path, type_name: str, is_tied: bool
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", type_name, tiny_model(is_tied=is_tied))
    first, num_first = start(path)
    second, num_second = start(path)
    assert (num_first, num_second) == (15 if is_tied else 16, 0)
    expected, found = packed_of(first), packed_of(second)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)
    assert second.info.num_parameters == first.info.num_parameters and second.weight_bytes
    for ours, theirs in zip(forward_together(second, SEQUENCES), forward_together(first, SEQUENCES), strict=True):
        assert torch.equal(ours, theirs)


def test_mapped_packed_weights_are_not_copied(start: Start, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model())
    start(path)
    storages = {tensor.untyped_storage().data_ptr() for tensor in packed_of(start(path)[0]).values()}
    assert len(storages) == 1 and str(the_file(tmp_path)) in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("fault", ["truncated", "malformed", "of another kind"])
def test_a_damaged_file_of_packed_weights_is_replaced(start: Start, tmp_path: Path, fault: str) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model())
    start(path)
    file = the_file(tmp_path)
    content = file.read_bytes()
    file.unlink()  # the first start may have mapped it
    changed = {"truncated": content[:-1], "malformed": content[:40], "of another kind": b"x" * len(content)}
    file.write_bytes(changed[fault])
    assert start(path)[1] == 16 and file.read_bytes() == content
    assert start(path)[1] == 0


def test_packed_weights_of_other_numbers_are_packed_again(start: Start, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model())
    start(path)
    file = the_file(tmp_path)
    content = bytearray(file.read_bytes())
    content[-4096:] = bytes(4096)
    file.write_bytes(content)
    assert start(path)[1] == 16 and start(path)[1] == 0


@pytest.mark.parametrize("settings", [{"reuse_self_check": False}, {"self_check": False}], ids=str)
def test_packed_weights_are_not_read_without_a_reusable_check(
    start: Start, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model())
    assert [start(path)[1], start(path, **settings)[1]] == [16, 16]


@pytest.mark.parametrize("settings", [{"max_num_batched_tokens": 64}, {"dtype": "float16"}], ids=str)
def test_other_settings_are_checked_against_unpacked_weights(
    start: Start, tmp_path: Path, settings: dict[str, Any]
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model())
    start(path)
    runner, num_packed = start(path, **settings)
    assert num_packed == (0 if settings.get("dtype") == "float16" else 16)
    assert all(logits.isfinite().all() for logits in forward_together(runner, SEQUENCES))


def test_files_of_packed_weights_make_room_for_new_ones(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_gguf(tmp_path / "first.gguf", "Q4_K", tiny_model())
    second = write_gguf(tmp_path / "second.gguf", "Q4_K", tiny_model(num_layers=1))
    start(first)
    old = the_file(tmp_path)
    old.with_name(".left.weights.4194305").write_bytes(b"by a killed process")
    monkeypatch.setattr(packed_file, "_MAX_BYTES", old.stat().st_size + 1)
    start(second)
    assert the_file(tmp_path) != old
    monkeypatch.setattr(packed_file, "_MAX_BYTES", 1)
    start(first)
    assert not old.exists()


def test_a_disk_with_little_room_keeps_no_packed_weights(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model())
    usage = os.statvfs(tmp_path)
    monkeypatch.setattr(packed_file.shutil, "disk_usage", lambda folder: type("Usage", (), {"free": usage.f_bsize}))
    start(path)
    assert list((tmp_path / "cache" / "packed").iterdir()) == []


def test_a_compiled_forward_of_an_earlier_start_is_loaded_without_tracing(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model(is_tied=True))
    first, _ = start(path, compile="on")
    expected = forward_together(first, SEQUENCES)
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "trace_call", None)
        second, num_packed = start(path, compile="on")
    assert second.is_compiled and num_packed == 0
    assert all(torch.equal(*pair) for pair in zip(forward_together(second, SEQUENCES), expected, strict=True))
    assert len({tensor.untyped_storage().data_ptr() for tensor in packed_of(second).values()}) == 1
    for file in (tmp_path / "cache" / "compiled").glob("*.code"):
        file.write_bytes(b"no code")
    assert start(path, compile="on")[0].is_compiled
