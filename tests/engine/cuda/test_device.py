"""On a GPU: recorded forwards have the eager bits, rows are independent, and a step waits for the device once."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks, forward_together
from betoken.engine.bring_up.step_costs import measure_step_costs
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens
from betoken.engine.sampling import SamplingParams
from tests.engine.tiny import CONFIGS, save_tiny

pytestmark = pytest.mark.gpu


def load(directory: str, **settings: object) -> ModelRunner:
    options = {"device": "cuda", "compile": "off", "num_pages": 256} | settings
    return load_runner(EngineConfig(directory, **options))  # type: ignore[arg-type]


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 101, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_graphs_have_the_eager_bits_and_rows_any_company(family: str, dtype: str, tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, family)
    recorded, eager = (load(saved, dtype=dtype, max_graph_rows=rows) for rows in (256, 0))
    sequences = prompts([37, 5, 1, 90])
    together = forward_together(recorded, sequences)
    for ids, whole, unrecorded in zip(sequences, together, forward_together(eager, sequences), strict=True):
        assert torch.equal(whole, unrecorded)
        for chunk_rows in (1, 2, 5, 16, 17, 33, 64, len(ids)):
            assert torch.equal(forward_in_chunks(recorded, ids, chunk_rows), whole)


def test_a_long_context_changes_no_bit_of_a_row(tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "llama"))
    short, long = prompts([20, 600])
    alone = forward_together(runner, [short])[0]
    page_ids, _ = runner.page_table.allocate(long)
    for start in range(0, 599, 200):
        runner.forward([Segment(page_ids, start, long[start : start + 200][: 599 - start], 0)])
    own, _ = runner.page_table.allocate(short)
    runner.forward([Segment(own, 0, short[:-1], 0)])
    beside = runner.forward([Segment(page_ids, 599, long[599:], 1), Segment(own, 19, short[19:], 1)]).logits
    assert torch.equal(beside[1:], alone[-1:])


@pytest.mark.parametrize("family", CONFIGS)
def test_a_compiled_forward_has_independent_rows(family: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, family), compile="on")
    assert runner.is_compiled
    for ids, whole in zip(prompts([37, 90]), forward_together(runner, prompts([37, 90])), strict=True):
        for chunk_rows in (1, 5, 17, 64):
            assert torch.equal(forward_in_chunks(runner, ids, chunk_rows), whole)


def test_the_pool_takes_what_the_largest_forward_leaves(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, "llama")
    free_before, _ = torch.cuda.mem_get_info()
    runner = load(saved, num_pages=None, kv_memory_fraction=0.25, page_size=256)
    free_after, _ = torch.cuda.mem_get_info()
    assert runner.page_table.num_pages > 1000
    assert 0.5 * free_before < free_after < 0.8 * free_before


def test_step_costs_of_many_rows_are_measured_too(tmp_path: Path) -> None:
    assert measure_step_costs(load(save_tiny(tmp_path, "llama")))[-1].rows == 128


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_step_waits_for_the_device_once(temperature: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(save_tiny(tmp_path, "llama"))
    page_ids, _ = runner.page_table.allocate(range(40))
    group = SampleGroup(SamplingParams(temperature=temperature, top_p=0.9), [1, 2], [3], [4, 5])
    segment = Segment(page_ids, 2, [3, 4, 5], 3)
    runner.forward([Segment(page_ids, 0, [1, 2], 0)])
    choose_tokens(runner.forward([segment]).logits, [group])  # compiles
    reads: list[torch.Tensor] = []
    tolist = torch.Tensor.tolist

    def read(tensor: torch.Tensor) -> list[int]:
        torch.cuda.set_sync_debug_mode("default")
        reads.append(tensor)
        return tolist(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", read)
    with no_waiting():
        choose_tokens(runner.forward([segment]).logits, [group])
    assert len(reads) == 1
