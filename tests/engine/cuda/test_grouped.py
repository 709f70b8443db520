"""Weights of few bits on the way that forwards take on a GPU: the numbers of the reference, traced, joined, per row."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from betoken.engine.batch import Segment, build_batch
from betoken.engine.bring_up.examine import _probe
from betoken.engine.compiled import trace_call
from betoken.engine.config import EngineConfig
from betoken.engine.cuda import forward as cuda_forward
from betoken.engine.cuda.compiled import join_linears
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.grouped_operators import fields_of, weight_of
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_linear import RowGroupedLinear, RowLinear, find_row_dependence, replace_grouped
from betoken.engine.families.replacement import replace_mixers
from betoken.engine.forward import ModelCall
from betoken.engine.kv_pool import KvPool
from betoken.engine.reference.forward import ReferenceForward
from betoken.engine.weights.layers import replace_linears
from betoken.engine.weights.loading import load_model
from tests.engine import quantized_files as files
from tests.engine.cuda.harness import MAX_CONTEXT, NUM_PAGES, PAGE_SIZE, batches
from tests.engine.gguf_files import write_gguf
from tests.engine.mixture_files import WAYS, save_both
from tests.engine.tiny import save_tiny
from tests.kernels.grouped_weights import draw_weight
from tests.products import slow


def save(kind: str, folder: Path) -> str:
    if kind.startswith("q"):
        return write_gguf(folder / "tiny.gguf", kind.upper())
    if kind.endswith("experts"):
        way = WAYS[1] if kind.startswith("fp8") else WAYS[0]
        return str(save_both(*way, folder)[1])
    save_tiny(folder, "llama")
    written = {
        "gptq-ordered": (files.gptq_config(4, 32, desc_act=True), files.store_gptq(4, 32, less=1, is_ordered=True)),
        "awq": (files.awq_config(32), files.store_awq(32)),
        "nf4": (files.bitsandbytes_config("nf4"), files.store_bitsandbytes("nf4")),
    }[kind]
    files.write_quantized(folder, *written)
    return str(folder)


def load(kind: str, folder: Path) -> tuple[CudaForward, ReferenceForward]:
    """Our forward, and the reference's over a separate pool and model."""
    path = save(kind, folder)
    config = EngineConfig(path, dtype="float32", num_pages=NUM_PAGES, compile="off")
    models = [load_model(config, lambda stage, fraction: None)[0] for _ in range(2)]
    for model in models:
        replace_mixers(model)
    pools = [KvPool(_probe(model, 256)[0], NUM_PAGES + 1, PAGE_SIZE, model.dtype, model.device) for model in models]
    replace_linears(models[0], RowLinear)
    replace_grouped(models[0])
    use_row_experts(models[0])
    assert find_row_dependence(models[0]) is None
    forward = CudaForward(models[0], pools[0], MAX_CONTEXT, "fake", True)
    return forward, ReferenceForward(models[1], pools[1], NUM_PAGES)


@pytest.mark.parametrize("kind", ["gptq-ordered", "nf4", "fp8 experts", "q4_1", *slow("awq", "mxfp4 experts", "q6_k")])
@torch.inference_mode()
def test_logits_of_grouped_weights_equal_the_references(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, reference = load(kind, tmp_path)
    eager = []
    for batch in batches():
        eager.append(forward(batch).logits.clone())
        torch.testing.assert_close(eager[-1], reference(batch).logits, rtol=0, atol=1e-4)

    def trace_only(call: ModelCall, example: Sequence[torch.Tensor], *others: object) -> object:
        return trace_call(call, example)

    monkeypatch.setattr(cuda_forward, "compile_call", trace_only)
    forward.compile(tmp_path)
    for batch, plain in zip(batches(), eager, strict=True):
        assert torch.equal(forward(batch).logits, plain)


@pytest.mark.parametrize(("kind", "num_joined"), [("awq", 4), ("q4_1", 4), ("gptq-ordered", 0)])
@torch.inference_mode()
def test_layers_that_read_the_same_rows_are_one_product(
    kind: str, num_joined: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _ = load(kind, tmp_path)
    separate = [forward(batch).logits.clone() for batch in batches()]
    found: list[int] = []

    def join_only(call: ModelCall, example: Sequence[torch.Tensor], model: nn.Module, cache_dir: Path) -> object:
        graph = trace_call(call, example)
        found.append(join_linears(graph, model))
        kept = {buffer.untyped_storage().data_ptr() for buffer in graph.buffers()}
        layers: Any = [module for module in model.modules() if isinstance(module, RowGroupedLinear)]
        assert all(layer.grouped.values.untyped_storage().data_ptr() in kept for layer in layers)
        return graph

    monkeypatch.setattr(cuda_forward, "compile_call", join_only)
    forward.compile(tmp_path)
    assert found == [num_joined]
    for batch, expected in zip(batches(), separate, strict=True):
        torch.testing.assert_close(forward(batch).logits, expected, rtol=0, atol=1e-4)
    batch = build_batch([Segment([0], 0, [1, 2], 2)], PAGE_SIZE, 64)
    assert forward(batch).logits.shape[0] == 2


def test_a_grouped_weight_is_rebuilt_from_its_fields() -> None:
    for weight in (
        draw_weight("int6", (5, 256), 16, "signed units"),
        draw_weight("int4", (5, 96), 32, "half", "zeros", is_ordered=True),
        draw_weight("int5", (5, 256), 32, "units", "units"),
    ):
        again = weight_of(fields_of(weight))
        assert again.tensors().keys() == weight.tensors().keys()
        assert torch.equal(again.dequantised(), weight.dequantised())
