"""The mode that keeps a model to row-independent operators: it changes no value, and refuses what it does not know."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from betoken.engine.attention import register_attention
from betoken.engine.bring_up.examine import _probe
from betoken.engine.cuda.operators import BatchContext
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_invariance import RowInvariance
from betoken.engine.errors import ModelRefusedError
from betoken.engine.families.replacement import replace_mixers
from betoken.engine.features import NO_FEATURES
from betoken.engine.forward import call_model
from betoken.engine.kv_pool import KvPool
from betoken.engine.paged_context import PagedContext
from betoken.kernels import dispatch
from betoken.kernels.rows import PagedRows
from tests.engine.tiny import CONFIGS, MIXTURES

X = torch.linspace(-1, 1, 5 * 24).reshape(5, 24)
WEIGHT = torch.linspace(1, -1, 7 * 24).reshape(7, 24)
BIAS = torch.arange(7.0)
PLACES = torch.tensor([[0, 3], [2, 1], [4, 4]])

REPLACED: dict[str, Callable[[], torch.Tensor]] = {
    "linear": lambda: functional.linear(X, WEIGHT, BIAS),
    "linear of three dimensions": lambda: functional.linear(X[None], WEIGHT),
    "product": lambda: X @ WEIGHT.T,
    "product of three dimensions": lambda: X[None] @ WEIGHT.T,
    "addmm": lambda: torch.addmm(BIAS, X, WEIGHT.T.contiguous()),
    "mean": lambda: X.pow(2).mean(-1, keepdim=True),
    "mean in a half type": lambda: X.bfloat16().mean(-1),
    "sum": lambda: X.sum(dim=1),
    "rms_norm": lambda: torch._fused_rms_norm(X, [24], WEIGHT[0], 1e-5)[0],
    "rms_norm of a half type": lambda: torch._fused_rms_norm(X.bfloat16(), [24], None, None)[0],
    "softmax": lambda: (100 * X).softmax(-1),
    "softmax with what is masked": lambda: X.masked_fill(X > 0.5, -torch.inf)[:4].softmax(1),
    "softmax of a half type": lambda: X.bfloat16().softmax(-1),
    "softmax of a half type in float32": lambda: X.bfloat16().softmax(-1, dtype=torch.float32),
}
REFUSED: dict[str, Callable[[], torch.Tensor]] = {
    "topk over rows": lambda: X.topk(2, dim=0).values,
    "sort": lambda: X.sort().values,
    "scatter over rows": lambda: X.scatter(0, PLACES, 1.0),
    "scatter of several values": lambda: X.scatter(1, PLACES, X),
    "bmm": lambda: torch.bmm(X[None], WEIGHT.T[None]),
    "mean over rows": lambda: X.mean(0),
    "sum of all": lambda: X.sum(dim=(0, 1)),
    "sum of whole numbers": lambda: X.int().sum(dim=1),
    "softmax over rows": lambda: X.softmax(0),
    "a layer norm over rows": lambda: functional.layer_norm(X, [5, 24]),
    "cumsum": lambda: X.cumsum(1),
    "scaled addmm": lambda: torch.addmm(BIAS, X, WEIGHT.T, beta=2),
}


@pytest.mark.parametrize("name", REPLACED)
def test_sums_under_row_invariance_are_ours_and_right(name: str) -> None:
    call = REPLACED[name]
    with dispatch.override("reference"), dispatch.recording() as taken, RowInvariance(), torch.inference_mode():
        ours = call()
    assert taken == ["reference"]
    theirs = call()
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight", [WEIGHT[0], None])
def test_a_layer_norm_is_of_our_sums(weight: torch.Tensor | None, dtype: torch.dtype) -> None:
    x = (1 + 9 * X).to(dtype)
    scale, shift = (None if part is None else part.to(dtype) for part in (weight, weight))
    with dispatch.override("reference"), dispatch.recording() as taken, RowInvariance(), torch.inference_mode():
        ours = functional.layer_norm(x, [24], scale, shift)
    assert taken == ["reference"] * 2 and ours.dtype == dtype
    torch.testing.assert_close(ours, functional.layer_norm(x, [24], scale, shift))


@pytest.mark.parametrize("name", REFUSED)
def test_an_unknown_operator_is_rejected_by_name(name: str) -> None:
    with pytest.raises(ModelRefusedError, match="the model"), RowInvariance():
        REFUSED[name]()


def test_a_product_of_one_term_passes() -> None:
    left, right = X[:, :1], X[:1]
    with RowInvariance():
        assert torch.equal(torch.bmm(left[None], right[None])[0], left * right)


def test_topk_of_a_row_takes_the_first_of_equals() -> None:
    scores = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0], [0.0, 0.0, 0.0, 0.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    with RowInvariance():
        values, places = scores.topk(3)
        least = scores.topk(2, largest=False).indices
    assert values.tolist() == [[3, 3, 3], [0, 0, 0], [5, 4, 3]]
    assert places.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2]]
    assert least.tolist() == [[0, 3], [0, 1], [4, 3]]
    assert values.is_contiguous() and places.is_contiguous()


def test_a_scatter_of_one_value_stays_within_rows() -> None:
    plain = X.scatter(1, PLACES, 9.0)
    with RowInvariance():
        assert torch.equal(X.scatter(-1, PLACES, 9.0), plain)
        assert torch.equal(X.clone().scatter_(1, PLACES, 9.0), plain)


@pytest.mark.parametrize("family", CONFIGS)
@torch.inference_mode()
def test_the_forward_of_a_family_is_the_same_under_row_invariance(family: str) -> None:
    model, context = load(family)
    arguments = (torch.tensor([[1, 2, 3, 4, 5]]), torch.arange(5)[None], torch.tensor([0, 2, 4]))
    (plain,) = call_model(model, context, NO_FEATURES, *arguments)
    assert use_row_experts(model) == (family in MIXTURES)
    with RowInvariance():
        (ours,) = call_model(model, context, NO_FEATURES, *arguments)
    torch.testing.assert_close(ours, plain, rtol=0, atol=plain.abs().mean().item() * 1e-5)


@pytest.mark.parametrize("family", MIXTURES)
@torch.inference_mode()
def test_stock_experts_are_refused(family: str) -> None:
    model, context = load(family)
    arguments = (torch.tensor([[1, 2, 3, 4, 5]]), torch.arange(5)[None], torch.tensor([0]))
    with pytest.raises(ModelRefusedError, match="aten"), RowInvariance():
        call_model(model, context, NO_FEATURES, *arguments)


def load(family: str) -> tuple[torch.nn.Module, BatchContext]:
    """A random model, and a context for five rows of one sequence."""
    register_attention()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="betoken").eval()
    replace_mixers(model)
    context = BatchContext()
    rows = PagedRows(*(torch.tensor(part, dtype=torch.int32) for part in (range(5), [0] * 5, [0, 1], [1])))
    context.paged = PagedContext(KvPool(_probe(model, 640)[0], 2, 16, model.dtype, model.device), rows)
    return model, context
