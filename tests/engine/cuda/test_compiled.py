"""The traced forward: nothing in it adds numbers up but our own operators, and it holds for any number of rows."""

from pathlib import Path

import pytest
import torch

from foretoken.engine.batch import Segment, build_batch
from foretoken.engine.compiled import trace_call
from foretoken.engine.cuda import forward as cuda_forward
from foretoken.engine.cuda.compiled import compile_call
from foretoken.kernels.expert_linear import IMPLEMENTATIONS
from tests.engine.cuda.test_forward import PAGE_SIZE, batches, load
from tests.engine.tiny import MIXTURES

SUMS = ("mm", "addmm", "bmm", "baddbmm", "linear", "mean", "sum", "matmul", "cumsum", "_softmax")


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite_swa", *MIXTURES])
@torch.inference_mode()
def test_a_trace_has_our_sums_only_and_the_eager_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _, _ = load(tmp_path, family)
    eager = [forward(batch).clone() for batch in batches()]
    graphs: list[torch.fx.GraphModule] = []

    def trace_only(*arguments: object) -> object:
        graphs.append(trace_call(*arguments[:2]))  # type: ignore[arg-type]
        return graphs[0]

    monkeypatch.setattr(cuda_forward, "compile_call", trace_only)
    forward.compile(tmp_path)
    called = [node.target for node in graphs[0].graph.nodes if node.op == "call_function"]
    names = [f"{target.namespace}.{target._opname}" for target in called if isinstance(target, torch._ops.OpOverload)]
    assert not {f"aten.{name}" for name in SUMS} & set(names)
    assert names.count("foretoken_rows.attend") == 2 and "foretoken_rows.linear" in names
    assert names.count("foretoken_rows.expert_linear") == (4 if family in MIXTURES else 0)
    assert forward.is_compiled
    for batch, plain in zip(batches(), eager, strict=True):
        assert torch.equal(forward(batch), plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", *MIXTURES])
@torch.inference_mode()
def test_compiled_rows_have_the_same_bits_in_any_company(family: str, tmp_path: Path) -> None:
    forward, reference, _ = load(tmp_path, family)
    ids, pages = list(range(1, 41)), list(range(10))
    whole_batch = build_batch([Segment(pages, 0, ids, 40)], PAGE_SIZE, 64)
    expected = reference(whole_batch)
    assert cuda_forward.compile_call is compile_call
    forward.compile(tmp_path)
    whole = forward(whole_batch).clone()
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-4)
    for num_rows in (1, 3, 16):
        for start in range(0, 40, num_rows):
            chunk = ids[start : start + num_rows]
            batch = build_batch([Segment(pages, start, chunk, len(chunk))], PAGE_SIZE, 64)
            assert torch.equal(forward(batch), whole[start : start + len(chunk)])


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
