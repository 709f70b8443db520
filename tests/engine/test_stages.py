"""A model whose layers are divided among pipeline stages: the bits of one process, for every kind of layers."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.load import load_runner, weight_bytes
from betoken.engine.bring_up.self_check import ReadOutput, features_of, forward_together, logits_of
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError, RankLostError
from betoken.engine.model_info import ModelInfo
from betoken.engine.ranks import joining, micro_batches
from betoken.engine.ranks.loading import load_part
from betoken.engine.ranks.stages import OtherLayer, stage_layers
from betoken.engine.runner import ModelRunner
from betoken.engine.tree import KeptPath
from tests.engine import quantized_files as files
from tests.engine.gguf_files import tiny_model, write_gguf
from tests.engine.rank_threads import (
    QUANTIZED,
    SEQUENCES,
    TIMEOUT_S,
    bits_of,
    compile_one_at_a_time,
    config_of,
    joined,
    shared_runner,
)
from tests.engine.tiny import save_tiny
from tests.products import slow

CASES = ["llama-float32", "mixtral-bfloat16", "gemma2-float32", "qwen3_5-bfloat16", "falcon_h1-float32"]
WITH_FEATURES = ["llama-2-2", "llama-4-2", "lfm2-3-3", *slow("gpt2-2-2", "qwen3_5-2-2", "mixtral-4-2")]
FURTHER = ["llama-bfloat16", "mixtral-float32", "gemma2-bfloat16", "qwen3_5-float32", "falcon_h1-bfloat16"]
FURTHER += ["gpt2-bfloat16", "bloom-float32", "lfm2-float32", "mamba-bfloat16", "gpt_oss-bfloat16", "qwen3-bfloat16"]


@pytest.fixture(autouse=True)
def short_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "_MIN_ROWS", 2)


def check_equal_bits(
    config: EngineConfig, size: int = 2, num_stages: int = 2, read: ReadOutput = logits_of
) -> ModelRunner:
    alone = load_runner(config)
    with shared_runner(config, size, num_stages) as shared:
        outputs = [forward_together(runner, SEQUENCES, read) for runner in (shared, alone)]
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*outputs, strict=True))
        for ours, theirs in zip(bits_of(shared), bits_of(alone), strict=True):
            assert torch.equal(ours, theirs)
        assert (shared.numerics, shared.info.num_parameters) == (alone.numerics, alone.info.num_parameters)
        return shared


@pytest.mark.parametrize("case", [*CASES, *slow(*FURTHER)])
def test_a_model_has_the_same_bits_on_two_stages(case: str, tmp_path: Path) -> None:
    family, dtype = case.split("-")
    check_equal_bits(config_of(save_tiny(tmp_path, family), dtype))


@pytest.mark.parametrize("case", WITH_FEATURES)
def test_the_last_stage_returns_the_hidden_states_of_all_layers(case: str, tmp_path: Path) -> None:
    family, size, num_stages = case.split("-")
    config = config_of(save_tiny(tmp_path, family), "bfloat16", feature_layers=lambda num: range(num + 1))
    found = [forward_together(load_runner(config), SEQUENCES, features_of)]
    with shared_runner(config, int(size), int(num_stages)) as shared:
        assert shared.feature_layers == tuple(range(shared.parts.num_layers + 1))
        found.append(forward_together(shared, SEQUENCES, features_of))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("is_tied", [False, True])
def test_drafters_look_up_embeddings_at_the_last_stage(is_tied: bool, size: int, tmp_path: Path) -> None:
    gguf, model = tmp_path / "tiny.gguf", tiny_model(is_tied=True)
    path = write_gguf(gguf, "Q4_K", model) if is_tied else save_tiny(tmp_path, "llama")
    config = config_of(path, shares_embedding=True)
    alone = load_runner(config)
    states, last = torch.randn(2, 3, alone.parts.hidden_size), alone.info.vocab_size - 1
    ids = torch.tensor([[0, last // 2, last // 2 + 1, last]])
    with shared_runner(config, size, 2) as shared, torch.inference_mode():
        page_ids = shared.page_table.allocate([1, 2, 3])[0]
        begun = shared.begin([Segment(page_ids, 0, [1, 2, 3], 3)])
        assert torch.equal(shared.parts.head(states), alone.parts.head(states))
        assert torch.equal(shared.parts.embed(ids), alone.parts.embed(ids))
        logits = shared.finish(begun).logits
        assert torch.equal(logits, forward_together(alone, [[1, 2, 3]])[0])
        assert shared.info.num_parameters == alone.info.num_parameters


def test_a_model_has_the_same_bits_on_two_stages_of_two_ranks(tmp_path: Path) -> None:
    check_equal_bits(config_of(save_tiny(tmp_path, "llama"), "bfloat16", self_check=True), 4, 2)


def test_a_model_has_the_same_bits_on_three_uneven_stages(tmp_path: Path) -> None:
    check_equal_bits(config_of(save_tiny(tmp_path, "lfm2"), "bfloat16"), 3, 3)


@pytest.mark.parametrize("size", [2, 4])
def test_a_gguf_model_with_tied_layers_has_the_same_bits_on_two_stages(size: int, tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "tiny.gguf", "Q4_K", tiny_model(is_tied=True)))
    shared = check_equal_bits(config, size)
    assert shared.weight_bytes < load_runner(config).weight_bytes
    assert shared.weight_bytes == weight_bytes(shared.parts._model)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_a_quantized_model_has_the_same_bits_on_two_stages(name: str, size: int, tmp_path: Path) -> None:
    files.write_quantized(Path(save_tiny(tmp_path, "llama")), *QUANTIZED[name])
    check_equal_bits(config_of(str(tmp_path)), size)


def interleaved_bits(runner: ModelRunner, is_staged: bool) -> list[Tensor]:
    """Logits of two sequences, of which the first decodes a tree and compacts it while the second is under way."""
    first, second = SEQUENCES[0][:9], SEQUENCES[0][9:]
    pages = [runner.page_table.allocate([*ids, *range(8)])[0] for ids in (first, second)]
    prompts = [Segment(own, 0, ids, len(ids)) for own, ids in zip(pages, (first, second), strict=True)]
    tree = Segment(pages[0], 9, [31, 32, 33, 34, 35], 5, [-1, -1, 1, 0, 2], num_committed=9)
    steps = [prompts[0], prompts[1], tree, Segment(pages[1], len(second), [7], 1), Segment(pages[0], 12, [40], 1)]
    found, begun = [], []
    for number, segment in enumerate(steps):
        if number == 4:  # while the second sequence is under way
            runner.compact([KeptPath(pages[0], 9, [1, 2, 4])])
        begun.append(runner.begin([segment]))
        if not is_staged or len(begun) == 2:
            found.append(runner.finish(begun.pop(0)).logits.clone())
    return [*found, *(runner.finish(each).logits.clone() for each in begun)]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_two_forwards_under_way_have_the_bits_of_one_after_the_other(family: str, tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, family), max_draft_tokens=8)
    alone = interleaved_bits(load_runner(config), is_staged=False)
    with shared_runner(config, 2, 2) as shared:
        assert shared.max_in_flight == 2
        for ours, theirs in zip(interleaved_bits(shared, is_staged=True), alone, strict=True):
            assert torch.equal(ours, theirs)


def test_a_compiled_model_has_the_same_bits_on_two_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_one_at_a_time(monkeypatch)
    config = config_of(save_tiny(tmp_path, "llama"), "bfloat16", compile="on", self_check=True)
    shared = check_equal_bits(replace(config, feature_layers=lambda num: range(num + 1)), read=features_of)
    assert shared.is_compiled


def parts_of(config: EngineConfig, num_stages: int) -> list[tuple[Any, ModelInfo]]:
    """The parts of a model by rank."""
    with joined(num_stages, num_stages) as groups:
        return [load_part(replace(config, ranks=group), lambda stage, fraction: None) for group in groups]


def test_a_stage_holds_the_weights_of_its_layers_alone(tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, "llama"))
    (last, _), (first, _) = parts_of(config, 2)
    assert [isinstance(layer, OtherLayer) for layer in first.model.layers] == [False, True]
    assert [isinstance(layer, OtherLayer) for layer in last.model.layers] == [True, False]
    assert list(first.model.embed_tokens.parameters()) and not list(first.lm_head.parameters())
    assert list(last.lm_head.parameters()) and not list(last.model.embed_tokens.parameters())


@pytest.mark.parametrize(
    ("family", "message"), [("llama", "pipeline: 3 is above 2"), ("zamba", "reads .*original_hidden_states")]
)
def test_models_that_stages_cannot_share_are_rejected(family: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelRefusedError, match=message):
        parts_of(config_of(save_tiny(tmp_path, family)), 3)


def test_layers_are_divided_evenly_and_earlier_stages_have_more() -> None:
    with joined(3, 3) as groups:
        assert [list(stage_layers(group, 7)) for group in groups] == [[5, 6], [3, 4], [0, 1, 2]]


def test_a_batch_with_trees_is_cut_into_batches_of_the_same_rows() -> None:
    segments = [Segment([3, 4], 2, [5, 6, 7], 2, [-1, -1, 0]), Segment([9], 0, [1, 2, 3], 1, adapter=2)]
    whole = build_batch(segments, 16, 64)
    parts = micro_batches.micro_batches(whole, 3)
    assert [part.num_rows for part in parts] == [2, 2, 2]
    assert [part.num_segments for part in parts] == [1, 2, 1]
    assert [part.has_trees for part in parts] == [True, True, False]
    assert sum((part.token_ids for part in parts), []) == whole.token_ids
    assert [part.adapters for part in parts] == [(0,), (0, 2), (2,)]
    assert [part.logit_rows for part in parts] == [[1], [0], [1]]


class RecordingBackend:
    """Records the calls of a backend's methods."""

    def __init__(self, backend: Any, calls: list[str]) -> None:
        self._backend, self._calls = backend, calls

    def __getattr__(self, name: str) -> Any:
        self._calls.append(name)
        return getattr(self._backend, name)


def test_hidden_states_of_gpus_are_exchanged_by_their_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(
        joining, "_nccl", lambda *place: RecordingBackend(joining._gloo(*place, address="127.0.0.1"), calls)
    )
    states = torch.ones(1, 2, 3, dtype=torch.bfloat16)
    with joined(2, 2, "cuda") as (last, first):
        thread = threading.Thread(target=first.send_states, args=(states,))
        thread.start()
        assert torch.equal(last.receive_states(states.shape, states.device), states)
        thread.join(TIMEOUT_S)
    assert sorted(calls) == ["recv", "send"]
    with joined(2, 2) as (last, _):
        assert last._tensors is last._link


def test_a_stage_that_fails_ends_the_exchange_of_the_next() -> None:
    found: list[Tensor | RankLostError] = []
    with joined(2, 2) as groups:
        thread = threading.Thread(target=lambda: found.append(groups[0].receive_states((1, 2, 3), torch.device("cpu"))))
        thread.start()
        groups[1].send_states(torch.ones(1, 2, 3, dtype=torch.float16))
        thread.join(TIMEOUT_S)
        groups[1].fail(LookupError("an internal error"))
        with pytest.raises(RankLostError, match="LookupError: an internal error"):
            groups[1].send_states(torch.ones(1, 2, 3, dtype=torch.float16))
    assert isinstance(found[0], Tensor) and torch.equal(found[0], torch.ones(1, 2, 3, dtype=torch.float16))
