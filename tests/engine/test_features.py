"""Hidden states out of the forward: numbered as transformers does it, a row's bits in any company, logits unchanged."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from betoken.engine.batch import Segment
from betoken.engine.bring_up import examine
from betoken.engine.bring_up.load import load_runner
from betoken.engine.bring_up.self_check import features_of, forward_in_chunks, forward_together
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.tree import KeptPath
from betoken.kernels.build import find_compiler
from betoken.kernels.cpu import LIBRARY
from tests.engine.tiny import CONFIGS, save_tiny

LIMITS = {"float32": 1e-5, "bfloat16": 3e-2}
needs_compiler = pytest.mark.skipif(find_compiler(LIBRARY) is None, reason="no C++ compiler")


def load(directory: str, dtype: str, compile_: str = "off", **settings: object) -> ModelRunner:
    options = {"num_pages": 64, "max_num_batched_tokens": 512, "self_check": False} | settings
    return load_runner(EngineConfig(directory, dtype=dtype, compile=compile_, **options))  # type: ignore[arg-type]


def every_layer(num_layers: int) -> range:
    return range(num_layers + 1)


def check(family: str, dtype: str, compile_: str, directory: Path) -> None:
    saved = save_tiny(directory, family)
    runner = load(saved, dtype, compile_, feature_layers=every_layer)
    assert runner.is_compiled == (compile_ == "on")
    rng = random.Random(3)
    sequences = [[rng.randrange(1, 101) for _ in range(length)] for length in (37, 1, 300)]
    together = forward_together(runner, sequences, features_of)
    model = AutoModelForCausalLM.from_pretrained(saved, dtype="float32", attn_implementation="eager").eval()
    assert runner.feature_layers == tuple(range(model.config.num_hidden_layers + 1))
    for ids, ours in zip(sequences, together, strict=True):
        with torch.no_grad():
            output = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        theirs = torch.stack([state[0] for state in output.hidden_states], dim=1)
        assert ours.shape == theirs.shape and ours.dtype == getattr(torch, dtype)
        for layer in runner.feature_layers:
            difference = (ours[:, layer].float() - theirs[:, layer]).abs().mean(dim=-1)
            # A half type's rounding may send a token of a mixture to other experts: most rows must hold it.
            assert difference.quantile(0.6) <= LIMITS[dtype] * theirs[:, layer].abs().mean(), layer
        for chunk_rows in (1, 5) if len(ids) < 40 else (33,):
            assert torch.equal(forward_in_chunks(runner, ids, chunk_rows, features_of), ours)
    assert load(saved, dtype, compile_).logits_digest == runner.logits_digest, "features changed the logits"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", CONFIGS)
def test_features_are_the_hidden_states_of_transformers_and_rows_stand_alone(
    family: str, dtype: str, tmp_path: Path
) -> None:
    check(family, dtype, "off", tmp_path)


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "llama")]
)
def test_compiled_features_are_the_hidden_states_and_change_no_logit(family: str, dtype: str, tmp_path: Path) -> None:
    check(family, dtype, "on", tmp_path)


@pytest.mark.parametrize("compile_", ["off", pytest.param("on", marks=needs_compiler)])
def test_features_of_a_trees_path_are_those_of_the_chain(compile_: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "llama"), "bfloat16", compile_, feature_layers=lambda n: (-1, 0, 1))
    prompt, drafts, parents = list(range(1, 22)), [30, 31, 32, 33, 34], [-1, -1, 0, 1, 3]
    pages, _ = runner.page_table.allocate(range(len(prompt) + len(drafts)))
    features = features_of(runner.forward([Segment(pages, 0, prompt + drafts, 6, parents)]))
    path = [1, 3, 4]
    runner.compact([KeptPath(pages, len(prompt), path)])
    chain = forward_in_chunks(runner, prompt + [drafts[node] for node in path], 64, features_of)
    kept = [*range(len(prompt)), *(len(prompt) + node for node in path)]
    assert torch.equal(features[kept], chain)
    # Rows that yield no logits have features all the same.
    later = features_of(runner.forward([Segment(pages, 24, [40, 41], 0)]))
    assert later.shape == (2, 3, 64)


def test_the_references_yield_features_without_their_padding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("betoken.engine.bring_up.prepare._kernels_for", lambda *given: None)
    saved = save_tiny(tmp_path, "llama")
    runner = load(saved, "float32", feature_layers=every_layer)
    features = forward_in_chunks(runner, [5, 6, 7, 8, 9], 5, features_of)
    assert features.shape == (5, 3, 64)
    assert torch.equal(forward_in_chunks(runner, [5, 6, 7, 8, 9], 2, features_of), features)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_head_of_the_last_state_gives_the_logits_and_the_embedding_the_first(dtype: str, tmp_path: Path) -> None:
    runner = load(save_tiny(tmp_path, "qwen3"), dtype, feature_layers=lambda n: (0, n))
    ids = [5, 6, 7, 8, 9]
    page_ids, _ = runner.page_table.allocate(ids)
    output = runner.forward([Segment(page_ids, 0, ids, 5)])
    logits, features = output.logits.clone(), features_of(output)
    with torch.inference_mode():
        assert torch.equal(runner.parts.head(features[:, 1]), logits)
        assert torch.equal(runner.parts.head(features[2:3, 1]), logits[2:3])
        assert torch.equal(runner.parts.embed(torch.tensor(ids)), features[:, 0])
    assert (runner.parts.hidden_size, runner.parts.num_layers) == (64, 2)


def test_feature_layers_outside_the_model_are_rejected_by_number(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, "llama")
    for layer in (3, -4):
        with pytest.raises(ModelRefusedError, match=rf"feature_layers: {layer} is outside \[-3, 2\]"):
            load(saved, "float32", feature_layers=lambda n, layer=layer: (layer,))


def test_a_model_that_gives_no_hidden_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe: Callable[..., object] = examine._probe

    def silent(model: object, *rest: object) -> object:
        call = type(model).forward
        monkeypatch.setattr(type(model), "forward", lambda *a, output_hidden_states=None, **k: call(*a, **k))
        return probe(model, *rest)

    monkeypatch.setattr(examine, "_probe", silent)
    with pytest.raises(ModelRefusedError, match="LlamaForCausalLM does not give the hidden states of its 2 layers"):
        load(save_tiny(tmp_path, "llama"), "float32", feature_layers=every_layer)
