"""States of short convolutions: after any drafts and results they equal the committed ids computed in one pass."""

import random
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner, runner_of
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families.refusals import check_layers
from betoken.engine.mixers.short_conv import ShortConv
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.loading import load_model
from betoken.kernels.cpu import load_cpu_kernels
from tests.engine.results import decide
from tests.engine.tiny import CONFIGS, save_tiny

PATHS = [(dtype, is_native) for dtype in ("float32", "bfloat16") for is_native in (True, False)]
MAX_TOKENS = 120


@pytest.fixture(scope="module", params=PATHS, ids=lambda given: "-".join(map(str, given)))
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    dtype, is_native = request.param
    if is_native and load_cpu_kernels() is None:
        pytest.skip("no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if not is_native:
            patch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
        directory = save_tiny(tmp_path_factory.mktemp("tiny"), "lfm2")
        options = {"page_size": 4, "compile": "off", "self_check": False}
        loaded = load_runner(EngineConfig(directory, dtype=dtype, num_pages=96, **options))
    assert ("reference kernels" in loaded.numerics) != is_native
    return loaded


def remembered(runner: ModelRunner, page_ids: list[int], length: int) -> list[torch.Tensor]:
    """The inputs [length, C] of every convolution, in the order of a sequence's ids."""
    pool = runner._forward._pool  # type: ignore[attr-defined]
    convolutions = [layer for layer, values in pool.values.items() if values.shape[3] == 0]
    assert convolutions == [0, 2, 3]
    return [pool.keys[layer][page_ids].flatten(0, 1)[:length, 0].clone() for layer in convolutions]


@examples(max_examples=8)
@given(seed=st.integers(0, 2**32))
def test_after_any_verification_the_conv_state_is_that_of_the_committed_ids(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    ids = [rng.randrange(101) for _ in range(rng.randrange(1, 12))]
    page_ids, _ = runner.page_table.allocate(range(MAX_TOKENS))
    at_once, _ = runner.page_table.allocate(range(MAX_TOKENS))
    try:
        check_random_results(runner, rng, ids, page_ids, at_once)
    finally:
        for pages in (page_ids, at_once):
            runner.page_table.release(pages)
    runner.page_table.check_integrity([])


def check_random_results(
    runner: ModelRunner, rng: random.Random, ids: list[int], page_ids: list[int], at_once: list[int]
) -> None:
    length = decide(runner, rng, ids, page_ids)
    runner.forward([Segment(at_once, 0, ids[:length], 0)])
    pairs = zip(remembered(runner, page_ids, length), remembered(runner, at_once, length), strict=True)
    assert all(torch.equal(ours, expected) for ours, expected in pairs)
    last = [runner.forward([Segment(pages, length, ids[length:], 1)]).logits.clone() for pages in (page_ids, at_once)]
    assert torch.equal(*last)


def test_a_sequence_reuses_the_conv_state_of_cached_pages(runner: ModelRunner) -> None:
    """The first rows after a cached page read what the page holds, right up to its border."""
    rng = random.Random(3)
    ids = [rng.randrange(101) for _ in range(23)]
    page_ids, num_cached = runner.page_table.allocate(ids)
    whole = runner.forward([Segment(page_ids, 0, ids, len(ids))]).logits.clone()
    runner.page_table.publish(page_ids, ids, len(ids))
    runner.page_table.release(page_ids)
    found, num_cached = runner.page_table.allocate(ids)
    assert num_cached == 20
    logits = runner.forward([Segment(found, num_cached, ids[num_cached:], 3)]).logits
    assert torch.equal(logits, whole[num_cached:])
    runner.page_table.release(found)


def test_conv_layers_are_supported_in_known_families_only() -> None:
    config = CONFIGS["lfm2"]()
    check_layers(config)
    config.model_type = "another"
    with pytest.raises(ModelRefusedError, match="layer type 'conv' is neither full nor sliding attention"):
        check_layers(config)


def test_a_convolution_with_padding_or_without_a_batch_is_rejected(tmp_path: Path) -> None:
    config = EngineConfig(save_tiny(tmp_path, "lfm2"), num_pages=8, compile="off", self_check=False)
    model, info = load_model(config, lambda stage, fraction: None)
    runner_of(config, model, info)
    mixer = next(module for module in model.modules() if isinstance(module, ShortConv))
    x = torch.zeros(1, 3, 64, dtype=model.dtype)
    with pytest.raises(ModelRefusedError, match="without a batch"):
        mixer(x)
    with pytest.raises(ModelRefusedError, match="mask"):
        mixer(x, torch.ones(1, 3))
    with pytest.raises(ModelRefusedError, match="without a batch"):
        model(torch.zeros(1, 3, dtype=torch.int64))  # the context of an earlier call is not left behind
