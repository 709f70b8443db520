"""The traced forward: nothing in it adds numbers up but our own operators, and it holds for any number of rows."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from betoken.engine.batch import Segment, build_batch
from betoken.engine.compiled import trace_call
from betoken.engine.cuda import forward as cuda_forward
from betoken.engine.cuda.compiled import compile_call, join_linears
from betoken.engine.cuda.row_invariance import RowInvariance
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.forward import ModelCall
from betoken.kernels.expert_linear import IMPLEMENTATIONS
from tests.engine.cuda.harness import PAGE_SIZE, batches, load
from tests.engine.tiny import MIXTURES
from tests.products import slow

SUMS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mean", "sum", "matmul", "cumsum", "_softmax", "native_layer_norm")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_oss", *slow("gemma2", "granite_swa", "mixtral")])
@torch.inference_mode()
def test_a_trace_has_our_sums_only_and_the_eager_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _, _ = load(tmp_path, family)
    eager = [forward(batch).logits.clone() for batch in batches()]
    graphs: list[torch.fx.GraphModule] = []

    def trace_only(*arguments: object) -> object:
        graphs.append(trace_call(*arguments[:2]))  # type: ignore[arg-type]
        return graphs[0]

    monkeypatch.setattr(cuda_forward, "compile_call", trace_only)
    forward.compile(tmp_path)
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    names = [f"{target.namespace}.{target._opname}" for target in called if isinstance(target, torch._ops.OpOverload)]
    assert not {f"aten.{name}" for name in SUMS} & set(names)
    assert names.count("betoken_rows.attend") == 2 and "betoken_rows.linear" in names
    assert names.count("betoken_rows.expert_linear") == (4 if family in MIXTURES else 0)
    assert forward.is_compiled
    for batch, plain in zip(batches(), eager, strict=True):
        assert torch.equal(forward(batch).logits, plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *MIXTURES])
@torch.inference_mode()
def test_compiled_rows_have_the_same_bits_in_any_company(family: str, tmp_path: Path) -> None:
    forward, reference, _ = load(tmp_path, family)
    ids, pages = list(range(1, 41)), list(range(10))
    whole_batch = build_batch([Segment(pages, 0, ids, 40)], PAGE_SIZE, 64)
    expected = reference(whole_batch).logits
    assert cuda_forward.compile_call is compile_call
    forward.compile(tmp_path)
    whole = forward(whole_batch).logits.clone()
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    for num_rows in (1, 3, 16):
        for start in range(0, 40, num_rows):
            chunk = ids[start : start + num_rows]
            batch = build_batch([Segment(pages, start, chunk, len(chunk))], PAGE_SIZE, 64)
            assert torch.equal(forward(batch).logits, whole[start : start + len(chunk)])


@pytest.mark.parametrize(("family", "num_joined"), [("llama", 4), ("gemma2", 4), ("gpt2", 0)])
@torch.inference_mode()
def test_layers_that_read_the_same_rows_are_one_product(
    family: str, num_joined: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products of two transformer layers: query, key and value, and gate and up."""
    forward, _, _ = load(tmp_path, family)
    separate = [forward(batch).logits.clone() for batch in batches()]
    found: list[tuple[int, int, int]] = []

    def join_only(call: ModelCall, example: Sequence[torch.Tensor], model: nn.Module, cache_dir: Path) -> object:
        graph = trace_call(call, example)
        num_before = _num_products(graph)
        found.append((join_linears(graph, model), num_before, _num_products(graph)))
        _check_memory(graph, model)
        return graph

    monkeypatch.setattr(cuda_forward, "compile_call", join_only)
    forward.compile(tmp_path)
    ((joined, num_before, num_after),) = found
    assert joined == num_joined and num_before - num_after == 3 * num_joined // 2
    for batch, expected in zip(batches(), separate, strict=True):
        torch.testing.assert_close(forward(batch).logits, expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_joined_weights_are_let_go_before_the_next_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _, _ = load(tmp_path, "llama")
    cat, num_left = torch.cat, []

    def join_only(call: ModelCall, example: Sequence[torch.Tensor], model: nn.Module, cache_dir: Path) -> object:
        graph = trace_call(call, example)
        layers = [module for module in model.modules() if isinstance(module, RowLinear)]
        separate = [StorageWeakRef(layer.weight.untyped_storage()) for layer in layers]

        def count(tensors: list[torch.Tensor]) -> torch.Tensor:
            num_left.append(sum(not reference.expired() for reference in separate))
            return cat(tensors)

        monkeypatch.setattr(torch, "cat", count)
        join_linears(graph, model)
        count([torch.zeros(1)])
        return graph

    monkeypatch.setattr(cuda_forward, "compile_call", join_only)
    forward.compile(tmp_path)
    assert num_left == [15, 12, 10, 7, 5]  # query, key, value; gate, up


def _num_products(graph: torch.fx.GraphModule) -> int:
    return sum(node.target is torch.ops.betoken_rows.linear.default for node in graph.graph.nodes)


def _check_memory(graph: torch.fx.GraphModule, model: nn.Module) -> None:
    """Each joined layer's own weight is a part of the joined one."""
    storages = {part.untyped_storage().data_ptr() for name, part in graph.named_buffers() if "joined" in name}
    weights = [layer.weight for layer in model.modules() if isinstance(layer, RowLinear)]
    parts = [weight for weight in weights if weight.untyped_storage().data_ptr() in storages]
    joined = sum(len(part) for name, part in graph.named_buffers() if "joined" in name and part.dim() == 2)
    assert sum(len(part) for part in parts) == joined


@pytest.mark.parametrize("num_depths", [1, 2])
@torch.inference_mode()
def test_biases_are_joined_too_but_no_layer_that_several_depths_share(num_depths: int) -> None:
    layers = [RowLinear(torch.randn(3, 3), torch.randn(3)) for _ in range(2)]

    def call(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for _ in range(num_depths):
            x = layers[0](x) * layers[1](x)
        return (x,)

    example = [torch.randn(1, 5, 3), torch.zeros(2), torch.zeros(2)]
    expected = call(*example)
    graph = trace_call(call, example)
    assert join_linears(graph, nn.ModuleList(layers)) == (1 if num_depths == 1 else 0)
    torch.testing.assert_close(graph(*example), expected)


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@torch.inference_mode()
def test_parts_of_joined_rows_may_be_read_by_what_takes_dense_ones(is_compiled: bool, tmp_path: Path) -> None:
    layers = nn.ModuleList(RowLinear(torch.randn(8, 8), None) for _ in range(3))

    def call(x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = layers[0](x), layers[1](x).view(1, -1, 2, 4)
        with RowInvariance():
            means = second.mean(-1, keepdim=True)  # of every head: no view of parts
        return (layers[2](first) + (second - means).flatten(2),)

    example = [torch.randn(1, 5, 8), torch.zeros(2), torch.zeros(2)]
    expected = call(*example)
    graph = trace_call(call, example)
    if is_compiled:
        joined: ModelCall = compile_call(call, example, layers, tmp_path)
    else:
        assert join_linears(graph, layers) == 1
        joined = graph
    for num_rows in (5, 1):
        rows = (example[0][:, :num_rows].contiguous(), *example[1:])
        torch.testing.assert_close(joined(*rows)[0], expected[0][:, :num_rows])


@pytest.mark.slow
@torch.inference_mode()
def test_compiled_experts_read_the_weights_where_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[tuple[int, tuple[int, ...]]] = []
    product = IMPLEMENTATIONS["reference"]

    def record(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        read.append((weight.data_ptr(), weight.stride()))
        return product(x, weight, *rest)

    monkeypatch.setitem(IMPLEMENTATIONS, "reference", record)
    forward, _, _ = load(tmp_path, "gpt_oss")  # which keeps them transposed
    batch = build_batch([Segment([0], 0, [1], 1)], PAGE_SIZE, 64)
    forward(batch)
    eager = read.copy()
    forward.compile(tmp_path)
    read.clear()
    forward(batch)
    assert len(set(eager)) == 4 and read == eager
