"""The compiled forward: the eager one to rounding, and its own rows to the last bit."""

import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch._inductor import config as inductor_config

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks, forward_together
from betoken.engine.compiled import compile_traced, trace_call
from betoken.engine.config import EngineConfig
from betoken.kernels.build import find_compiler
from betoken.kernels.cpu import LIBRARY
from tests.engine.tiny import CONFIGS, HYBRIDS, save_tiny
from tests.products import slow

pytestmark = pytest.mark.skipif(find_compiler(LIBRARY) is None, reason="no C++ compiler")


def check(family: str, dtype: str, directory: Path) -> None:
    saved = save_tiny(directory, family)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(1, 101, (length,), generator=generator).tolist() for length in (37, 1, 300, 18)]
    eager, compiled = (
        load_runner(EngineConfig(saved, dtype=dtype, num_pages=64, max_num_batched_tokens=512, compile=choice))  # type: ignore[arg-type]
        for choice in ("off", "on")
    )
    assert compiled.is_compiled and not eager.is_compiled
    together = forward_together(compiled, sequences)
    for ids, whole, plain in zip(sequences, together, forward_together(eager, sequences), strict=True):
        assert whole.dtype == torch.float32 and not torch.equal(whole, whole.bfloat16().float()), "sums, not rounded"
        scale = plain.float().abs().mean().item()
        limit = 1e-4 if dtype == "float32" else 5e-2
        assert (whole.float() - plain.float()).abs().mean().item() < scale * limit
        for chunk_rows in (1, 2, 5, 16) if len(ids) < 40 else (33,):
            assert torch.equal(forward_in_chunks(compiled, ids, chunk_rows), whole)
    unchecked = load_runner(EngineConfig(saved, dtype=dtype, num_pages=64, compile="on", self_check=False))  # type: ignore[arg-type]
    assert torch.equal(forward_in_chunks(unchecked, sequences[0], 7), together[0])  # compiled, not eager
    page_ids, _ = compiled.page_table.allocate(range(8))
    assert compiled.forward([Segment(page_ids, 0, [1, 2, 3], 0)]).logits.shape == (0, 101)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_compiled_rows_have_the_same_bits_in_any_company(dtype: str, tmp_path: Path) -> None:
    check("llama", dtype, tmp_path)


@pytest.mark.parametrize("family", ["qwen3_5", "mamba", *slow("granitemoehybrid")])
def test_recurrences_compile(family: str, tmp_path: Path) -> None:
    check(family, "bfloat16", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", [family for family in CONFIGS | HYBRIDS if family != "llama"])
def test_every_family_compiles(family: str, dtype: str, tmp_path: Path) -> None:
    check(family, dtype, tmp_path)


def test_forwards_of_few_rows_compile(tmp_path: Path) -> None:
    load_runner(EngineConfig(save_tiny(tmp_path, "llama"), num_pages=8, max_num_batched_tokens=8, compile="on"))


def test_a_model_that_cannot_be_compiled_runs_eagerly_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("it reads the weather")

    monkeypatch.setattr("betoken.engine.cpu.forward.compile_call", fail)
    runner = load_runner(EngineConfig(save_tiny(tmp_path, "llama"), num_pages=32))
    assert not runner.is_compiled and "reads the weather" in caplog.text
    runner.page_table.check_integrity([])


def test_few_pages_are_no_reason_to_run_eagerly(tmp_path: Path) -> None:
    runner = load_runner(EngineConfig(save_tiny(tmp_path, "llama"), num_pages=5, page_size=1, max_context=2))
    assert runner.is_compiled
    runner.page_table.check_integrity([])


def test_a_compile_cache_that_others_can_write_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caches: list[Path] = []
    monkeypatch.setattr("betoken.engine.compiled.set_inductor_cache", caches.append)
    monkeypatch.setattr("torch._inductor.standalone_compile", lambda *_, **__: None)
    tmp_path.chmod(0o777)
    compile_traced(lambda: torch.fx.GraphModule({}, torch.fx.Graph()), (), {}, tmp_path)
    assert tmp_path not in caches[0].parents and f"not kept in {tmp_path}" in caplog.text


def test_a_space_in_a_path_is_named_where_the_compiler_stumbles_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_nothing(*_: object, **__: object) -> None:
        raise RuntimeError("input file '/home/my' is the same as output file")

    monkeypatch.setattr("betoken.engine.compiled.set_inductor_cache", lambda directory: None)
    monkeypatch.setattr("torch._inductor.standalone_compile", compile_nothing)
    saved, cache = save_tiny(tmp_path, "llama"), tmp_path / "my cache"
    assert not load_runner(EngineConfig(saved, num_pages=32, cache_dir=cache)).is_compiled
    assert f"'{cache}' holds a space" in caplog.text and "is the same as output file" in caplog.text


def test_no_headers_are_compiled_beforehand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be in the temporary folder, which is empty in every new container: half a minute of each start."""
    choices: list[bool] = []

    def compile_nothing(*_: object, **__: object) -> None:
        choices.append(inductor_config.cpp_cache_precompile_headers)
        raise RuntimeError("not compiled here")

    monkeypatch.setattr("torch._inductor.standalone_compile", compile_nothing)
    load_runner(EngineConfig(save_tiny(tmp_path, "llama"), num_pages=8))
    assert choices and not any(choices)


def test_processors_that_share_a_cache_keep_their_code_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches: list[Path] = []
    monkeypatch.setattr("betoken.engine.compiled.set_inductor_cache", caches.append)
    monkeypatch.setattr("torch._inductor.standalone_compile", lambda *_, **__: None)
    for capability in ("AVX2", "AVX2", "AVX512"):
        monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda capability=capability: capability)
        compile_traced(lambda: torch.fx.GraphModule({}, torch.fx.Graph()), (), {}, tmp_path)
    assert caches[0] == caches[1] != caches[2]


def test_workers_of_one_model_that_start_together_compile_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, most = [], []

    def compile_slowly(*_: object, **__: object) -> None:
        running.append(None)
        most.append(len(running))
        time.sleep(0.3)
        running.pop()

    monkeypatch.setattr("betoken.engine.compiled.set_inductor_cache", lambda directory: None)
    monkeypatch.setattr("torch._inductor.standalone_compile", compile_slowly)
    graph = torch.fx.GraphModule({}, torch.fx.Graph())
    workers = [Thread(target=compile_traced, args=(lambda: graph, (), {}, tmp_path)) for _ in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert most == [1, 1, 1]


def test_compiled_code_reads_the_models_own_weights(tmp_path: Path) -> None:
    """And not a copy: the model would be in memory twice."""
    weight = torch.ones(3, 5)
    example = (torch.ones(7, 3), torch.ones(7, 3), torch.ones(7, 3))
    run = compile_traced(lambda: trace_call(lambda x, y, z: ((x + y + z) @ weight,), example), example, {}, tmp_path)
    (before,) = run(*example)
    weight *= 2
    assert torch.equal(run(*example)[0], 2 * before)
