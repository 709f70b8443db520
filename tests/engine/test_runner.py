"""The runner against the models themselves: any family, any grouping of rows, the same bits."""

from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import forward_in_chunks, forward_together
from betoken.engine.bring_up.step_costs import measure_step_costs
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.kernels import native
from tests.engine.tiny import CONFIGS, HYBRIDS, save_tiny
from tests.engine.tiny_hybrids import WIDER
from tests.products import covering

DTYPES = ("bfloat16", "float32")
IN_SOME_TYPE = [
    *covering([family for family in CONFIGS | HYBRIDS if family not in WIDER], DTYPES, strength=1),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in product(WIDER, DTYPES)),
]
"""Families, each in one of the types; the slow run has each in both."""


def load(directory: str, dtype: str, **settings: object) -> ModelRunner:
    settings.setdefault("compile", "off")
    return load_runner(EngineConfig(directory, dtype=dtype, **({"num_pages": 128} | settings)))  # type: ignore[arg-type]


def prompts(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, 101, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize(("family", "dtype"), IN_SOME_TYPE)
def test_ragged_batch_equals_the_models_own_forward(family: str, dtype: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, family)
    runner = load(directory, dtype)
    sequences = prompts([23, 1, 9, 40])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    for ids, ours in zip(sequences, forward_together(runner, sequences), strict=True):
        theirs = model(torch.tensor([ids])).logits[0]
        scale = theirs.abs().mean().item()
        if dtype == "float32":
            torch.testing.assert_close(ours, theirs, rtol=0, atol=scale * 1e-3)
        else:  # in the mean: one rounding may send one token to another expert
            assert (ours - theirs).abs().mean().item() < scale * 5e-2


@pytest.mark.parametrize(("family", "dtype"), IN_SOME_TYPE)
def test_a_row_has_the_same_bits_in_any_batch(family: str, dtype: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, family), dtype, self_check=False)
    chunks = {37: (1, 5, 37), 5: (1, 2, 5), 1: (1,), 18: (2, 8, 18)}
    sequences = prompts([*chunks])
    together = forward_together(runner, sequences)
    for ids, whole in zip(sequences, together, strict=True):
        for chunk_rows in chunks[len(ids)]:
            assert torch.equal(forward_in_chunks(runner, ids, chunk_rows), whole)
    runner.page_table.check_integrity([])


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_gate_of_one_number_a_row_has_the_same_bits_in_any_batch(
    has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
    runner = load(save_tiny(tmp_path, "qwen2_moe"), "float32", max_context=32)  # as long as its window
    assert ("reference kernels, eager" in runner.numerics) != has_kernels
    (ids,) = prompts([32])
    whole = forward_together(runner, [ids])[0]
    for chunk_rows in (1, 2, 5, 31):
        assert torch.equal(forward_in_chunks(runner, ids, chunk_rows), whole)


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_replicas_may_differ_in_threads_and_pages(
    family: str, has_kernels: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernels:
        monkeypatch.setattr("betoken.engine.bring_up.prepare.load_cpu_kernels", lambda cache_dir: None)
    directory = save_tiny(tmp_path, family)
    ids, names = prompts([140])[0], set()
    forwards = []
    for num_threads, page_size, max_num_batched_tokens in [(1, 16, 256), (2, 16, 33), (3, 5, 256), (1, 64, 256)]:
        settings = {
            "num_threads": num_threads,
            "page_size": page_size,
            "max_num_batched_tokens": max_num_batched_tokens,
        }
        runner = load(directory, "bfloat16", self_check=False, **settings)
        names.add(runner.numerics)
        forwards.append(forward_in_chunks(runner, ids, max_num_batched_tokens))
    assert all(torch.equal(forward, forwards[0]) for forward in forwards)
    assert len(names) == 1


def test_a_kv_pool_smaller_than_the_named_logits_works(tmp_path: Path) -> None:
    config = EngineConfig(save_tiny(tmp_path, "llama"), num_pages=4, page_size=2, compile="off", self_check=False)
    assert load_runner(config).numerics


TINY_PAGE_BYTES = 2 * 16 * 2 * (16 + 16) * 4
"""Bytes of two layers: 16 slots, two heads, keys and values of 16, float32."""


@pytest.mark.parametrize(
    ("settings", "num_pages", "max_context"),
    [
        ({"kv_memory_bytes": 50 * TINY_PAGE_BYTES}, 50, 640),
        ({"kv_memory_bytes": 20 * TINY_PAGE_BYTES}, 20, 320),
        ({"num_pages": 20}, 20, 320),
        ({"num_pages": 20, "max_context": 320}, 20, 320),
        ({"kv_memory_bytes": 50 * TINY_PAGE_BYTES, "max_context": 100}, 50, 100),
    ],
)
def test_kv_takes_no_more_memory_than_it_is_given(
    settings: dict[str, int], num_pages: int, max_context: int, tmp_path: Path
) -> None:
    runner = load(save_tiny(tmp_path, "llama"), "float32", compile="off", **({"num_pages": None} | settings))
    assert (runner.page_table.num_pages, runner.info.max_context) == (num_pages, max_context)


def test_a_requested_context_has_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("betoken.engine.config._KV_MEMORY_BYTES", 20 * TINY_PAGE_BYTES)
    runner = load(save_tiny(tmp_path, "llama"), "float32", compile="off", num_pages=None, max_context=400)
    assert (runner.page_table.num_pages, runner.info.max_context) == (25, 400)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory_bytes": 20 * TINY_PAGE_BYTES, "max_context": 321}, "kv_memory_bytes: .* 320 .* max_context = 321"),
        ({"num_pages": 20, "max_context": 640}, "num_pages: .* 320 .* max_context = 640"),
        ({"kv_memory_bytes": 1}, "kv_memory_bytes: 0 pages"),
        ({"kv_memory_bytes": 1, "self_check": False}, "kv_memory_bytes: 0 pages"),
    ],
)
def test_too_little_memory_for_kv_is_refused(settings: dict[str, int], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match=message):
        load(save_tiny(tmp_path, "llama"), "float32", compile="off", **({"num_pages": None} | settings))


def test_a_function_that_rounds_otherwise_changes_the_name_of_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save_tiny(tmp_path, "gemma2")
    ours, tanh = load(directory, "float32"), torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda x: torch.nextafter(tanh(x), torch.ones(())))
    theirs = load(directory, "float32")  # within what the check at load takes for rounding
    assert ours.numerics.split(", logits ")[0] == theirs.numerics.split(", logits ")[0]
    assert ours.numerics != theirs.numerics


def test_the_instruction_set_of_the_kernels_is_in_the_name_of_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The router accepts workers of equal names as replicas."""
    directory, names = save_tiny(tmp_path, "llama"), set()
    for isa in ("native", "avx2"):
        monkeypatch.setenv("BETOKEN_CPU_ISA", isa)
        names.add(load(directory, "float32", compile="off", self_check=False).numerics.split(", logits ")[0])
    assert len(names) == 2


@pytest.mark.parametrize("num_threads", [2, 3])
def test_a_row_has_the_same_bits_in_a_forward_large_enough_to_be_divided(num_threads: int, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "gemma2"), "float32", num_threads=num_threads)
    (ids,) = prompts([255])  # torch would divide 255 x 96 activations in mid-vector
    assert torch.equal(forward_in_chunks(runner, ids, 15), forward_together(runner, [ids])[0])


def test_a_rejected_draft_leaves_no_trace(tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "llama"), "float32")
    (ids,) = prompts([30])
    whole = forward_together(runner, [ids])[0]
    page_ids, _ = runner.page_table.allocate(range(40))
    runner.forward([Segment(page_ids, 0, ids[:20], 0)])
    runner.forward([Segment(page_ids, 20, [7, 8, 9, 10, 11, 12], 6)])  # all rejected: the length stays 20
    assert torch.equal(runner.forward([Segment(page_ids, 20, ids[20:], 10)]).logits, whole[20:])


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "lfm2"])
def test_greedy_decode_equals_generate(family: str, tmp_path: Path) -> None:
    directory = save_tiny(tmp_path, family)
    runner = load(directory, "float32")
    (ids,) = prompts([17])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()
    expected = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=24, eos_token_id=None)[0].tolist()
    page_ids, _ = runner.page_table.allocate(range(64))
    tokens, length = list(ids), 0
    while len(tokens) < len(expected):
        logits = runner.forward([Segment(page_ids, length, tokens[length:], 1)]).logits
        length = len(tokens)
        tokens.append(int(logits[0].argmax()))
    assert tokens == expected


def test_a_half_type_model_that_widens_its_logits_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at load allows for what the model computes in, not for what it answers in."""

    def forward(self: LlamaForCausalLM, **keywords: object) -> object:
        output = own_forward(self, **keywords)
        output.logits = output.logits.float()
        return output

    own_forward = LlamaForCausalLM.forward
    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    runner = load(save_tiny(tmp_path, "llama"), "bfloat16")
    assert forward_together(runner, prompts([5]))[0].dtype == torch.float32


def test_a_forward_without_logits_returns_none(tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "llama"), "float32")
    page_ids, _ = runner.page_table.allocate(range(8))
    assert runner.forward([Segment(page_ids, 0, [1, 2, 3], 0)]).logits.shape == (0, 101)


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment([0], 0, [], 0), "0 ids"),
        (Segment([0], 0, [1, 2], 3), "num_logits"),
        (Segment([0], 15, [1, 2], 1), "do not cover"),
        (Segment([0], 0, [101], 1), "outside"),
        (Segment(range(64), 640, [1], 1), "position"),
        (Segment(range(20), 0, [1] * 300, 1), "rows"),
    ],
)
def test_bad_segments_of_a_forward_are_rejected(segment: Segment, message: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "llama"), "float32", self_check=False)
    with pytest.raises(ValueError, match=message):
        runner.forward([segment])


def test_the_runner_reports_model_info_and_step_costs(tmp_path: Path) -> None:
    stages: list[float] = []
    config = EngineConfig(save_tiny(tmp_path, "gpt2"), dtype="auto", num_pages=50, compile="off")
    runner = load_runner(config, lambda stage, fraction: stages.append(fraction))
    assert stages and stages == sorted(stages)
    info = runner.info
    assert (info.dtype, info.vocab_size, info.max_context, info.eos_token_ids) == ("float32", 101, 640, (0,))
    assert len(info.weights_fingerprint) == 64 and info.tokenizer_hash == ""
    costs = measure_step_costs(runner, rows=(1, 4), contexts=(64, 100000))
    assert [(cost.rows, cost.context) for cost in costs] == [(1, 64), (4, 64)] and all(cost.ns > 0 for cost in costs)
    runner.page_table.check_integrity([])


@pytest.mark.parametrize(
    ("settings", "context", "most_rows"), [({}, 512, 32), ({"max_context": 100}, 68, 32), ({"max_context": 20}, 0, 16)]
)
def test_steps_are_timed_also_where_little_context_fits(
    settings: dict[str, int], context: int, most_rows: int, tmp_path: Path
) -> None:
    """Without a table no worker knows what a row of a draft costs."""
    costs = measure_step_costs(load(save_tiny(tmp_path, "llama"), "float32", self_check=False, **settings))
    assert {cost.context for cost in costs} == {context}
    assert (costs[0].rows, costs[-1].rows) == (1, most_rows)


def test_a_model_on_the_cpu_loads_the_sampling_kernels(tmp_path: Path) -> None:
    if not native.is_available():
        pytest.skip("no C compiler")
    native._library.cache_clear()
    cache_dir = tmp_path / "cache"
    try:
        load_runner(EngineConfig(save_tiny(tmp_path, "llama"), num_pages=8, compile="off", cache_dir=cache_dir))
        assert len(list(cache_dir.glob("native-kernels-*.so"))) == 1
    finally:
        native._cache_dir = None
        native._library.cache_clear()
