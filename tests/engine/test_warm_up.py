"""Loading compiles every kernel that requests may need, if kernels are compiled at their first call."""

from dataclasses import replace
from pathlib import Path

import pytest

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.sampler import SampleGroup, choose_tokens, perturbed_top
from betoken.engine.sampler.draft_probs import sample_drafts
from betoken.engine.sampler.verification import BlockGroup, VerificationMode, verify_blocks
from betoken.engine.sampling import SamplingParams
from betoken.engine.sparse_probs import SparseProbs
from betoken.engine.tree import KeptPath
from tests.engine.tiny import save_tiny
from tests.kernels.variants import recorded_variants

STAGE = "compiling what chooses tokens"
KERNELS = {"_adjust", "_compact", "_decide", "_draw", "_gumbel", "_narrow", "_rank", "_reject", "_row_weights"}
KERNELS |= {"_scan", "_typical"}
DRAWN = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, seed=3)
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=0),
    SamplingParams(),
    DRAWN,
    replace(DRAWN, num_logprobs=20),
    replace(DRAWN, logit_bias=((5, 1.0), (16, -100.0)), presence_penalty=0.5, frequency_penalty=1.0),
    replace(DRAWN, min_new_tokens=9, eos_token_ids=(1,), stop_token_ids=(2,)),
]


def load(directory: Path, dtype: str, stages: list[str]) -> ModelRunner:
    config = EngineConfig(save_tiny(directory, "llama"), dtype=dtype, compile="off", num_pages=64, page_size=4)
    return load_runner(config, lambda stage, fraction: stages.append(stage))


def serve(runner: ModelRunner) -> None:
    """Steps of a verify and of a draft worker: every way to choose, many sizes, in every mode, chains and trees."""
    page_ids, _ = runner.page_table.allocate(range(40))
    for params in PARAMS:
        for num_drafts in (0, 1, 4, 15):
            drafts = list(range(1, num_drafts + 1))
            rows = SampleGroup(params, [5, 6], [7], drafts)
            for mode in VerificationMode:
                for probs in ([], [SparseProbs([3, draft], [0.5, 0.5]) for draft in drafts]):
                    logits = runner.forward([Segment(page_ids, 2, [7, *drafts], num_drafts + 1)]).logits
                    verify_blocks(logits, [BlockGroup(rows, mode, probs)])
            tree = replace(rows, parents=[-1] * num_drafts)
            verify_blocks(logits.repeat(3, 1), [BlockGroup(group) for group in (tree, rows, tree)])
            choose_tokens(logits, [rows])
        drafted = [SampleGroup(params, [5, 6], [7], [])] * 5
        perturbed_top(logits[:5], drafted, num_top=4, scale=2.0)
        sample_drafts(logits[[1, 2, 3, 4, 5]], drafted)
    runner.compact([KeptPath(page_ids, 3, [1, 2, 5]), KeptPath(page_ids[5:], 2, [4])])
    runner.page_table.release(page_ids)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_after_the_warm_up_no_request_waits_for_the_compiler(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stages: list[str] = []
    with recorded_variants(monkeypatch) as variants:
        runner = load(tmp_path, dtype, stages)
        compiled = set(variants)
        assert runner.page_table.num_free == 64
        serve(runner)
    assert variants == compiled and {name for name, _ in compiled} == KERNELS
    assert stages[-1] == STAGE


def test_a_warm_up_on_the_cpu_compiles_no_triton_kernel(tmp_path: Path) -> None:
    stages: list[str] = []
    load(tmp_path, "float32", stages)
    assert STAGE not in stages


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.gpu
def test_after_a_warm_up_on_a_device_no_request_waits_for_the_compiler(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton import knobs

    options = {"dtype": dtype, "device": "cuda", "compile": "off", "num_pages": 64, "page_size": 4}
    config = EngineConfig(save_tiny(tmp_path, "llama"), **options)
    runner = load_runner(config)
    compiled: list[str] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **keywords: compiled.append(keywords["repr"]))
    serve(runner)
    assert not compiled
