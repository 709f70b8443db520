"""Recurrent states: after any drafts and results they equal the states of the committed ids in one pass."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import IntegrityError, OutOfPagesError
from betoken.engine.page_table import PageTable
from betoken.engine.runner import ModelRunner
from betoken.engine.state_table import PageList, StateTable
from betoken.kernels.cpu import load_cpu_kernels
from tests.engine.results import decide
from tests.engine.tiny import save_tiny

CASES = [
    ("qwen3_next", "float32", True),
    ("qwen3_next", "bfloat16", True),
    ("qwen3_next", "float32", False),
    ("granitemoehybrid", "bfloat16", True),
    ("granitemoehybrid", "float32", False),
    ("jamba", "bfloat16", True),
    ("recurrent_gemma", "bfloat16", True),
]
MAX_TOKENS = 120


@pytest.fixture(scope="module", params=CASES, ids=lambda given: "-".join(map(str, given)))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    family, dtype, is_native = request.param
    if is_native and load_cpu_kernels() is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
        directory = save_tiny(tmp_path_factory.mktemp("tiny"), family)
        options = {"page_size": 4, "compile": "off", "max_draft_tokens": 8, "self_check": False}
        config = EngineConfig(directory, dtype=dtype, num_pages=96, **options)
        loaded = load_runner(config)
    assert ("reference kernels" in loaded.numerics) != is_native
    return loaded


def states(runner: ModelRunner, pages: PageList) -> list[torch.Tensor]:
    assert pages.state is not None
    pool = runner._forward._states  # type: ignore[attr-defined]
    return [layer.state[pages.state.index].clone() for layer in pool.recurrent.values()]


@examples(max_examples=6, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_after_any_verification_the_recurrent_state_is_that_of_the_committed_ids(
    runner: ModelRunner, seed: int
) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(101) for _ in range(rng.randrange(1, 12))]
    pages, _ = runner.page_table.allocate(range(MAX_TOKENS))
    at_once, _ = runner.page_table.allocate(range(MAX_TOKENS))
    try:
        length = decide(runner, rng, ids, pages)
        runner.forward([Segment(at_once, 0, ids[:length], 0)])
        last = [runner.forward([Segment(of, length, ids[length:], 1)]).logits.clone() for of in (pages, at_once)]
        assert torch.equal(*last)
        assert all(torch.equal(*pair) for pair in zip(states(runner, pages), states(runner, at_once), strict=True))
    finally:
        runner.page_table.release(pages)
        runner.page_table.release(at_once)
    runner.page_table.check_integrity([])


def test_the_state_memory_of_a_sequence_is_reported(runner: ModelRunner) -> None:
    pool = runner._forward._states  # type: ignore[attr-defined]
    tensors = [tensor for layer in pool.layers() for tensor in layer]
    num_states = max(len(tensor) for tensor in tensors)
    assert runner.state_bytes == sum(tensor.numel() * tensor.element_size() for tensor in tensors) // num_states > 0


def test_a_sequence_cannot_go_back_before_its_state(runner: ModelRunner) -> None:
    pages, _ = runner.page_table.allocate(range(40))
    runner.forward([Segment(pages, 0, list(range(8)), 1)])
    try:
        with pytest.raises(ValueError, match=r"segments\[0\].kv_length: 5 is below 8"):
            runner.forward([Segment(pages, 5, [1], 1)])
        with pytest.raises(ValueError, match="20 tokens after 8 committed ones, 18 can wait"):
            runner.forward([Segment(pages, 8, list(range(20)), 1, num_committed=8)])
        runner.forward([Segment(pages, 0, [3], 1)])  # from the beginning, as after a start anew
    finally:
        runner.page_table.release(pages)


def test_states_are_owned_through_page_lists() -> None:
    table = PageTable(8, 4, states=StateTable(2))
    first, second, third = PageList(), PageList(), PageList()
    table.extend(first, 4)
    table.extend(second, 4)
    table.extend(second, 8)
    assert first.state is not None and second.state is not None and first.state.index != second.state.index
    assert not table.can_extend(third, 1)
    with pytest.raises(OutOfPagesError, match="page"):
        table.extend(third, 1)
    table.check_integrity([first, second])
    with pytest.raises(IntegrityError, match="states"):
        table.check_integrity([first, PageList(second)])
    table.release(first)
    table.extend(third, 1)
    table.check_integrity([second, third])
    with pytest.raises(TypeError, match="PageList"):
        PageTable(8, 4, states=StateTable(2)).extend([], 1)
