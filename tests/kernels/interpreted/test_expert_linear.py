"""The experts' linear layers: each row by its own expert, within rounding of the exact one, to the last bit alike."""

from itertools import product

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.expert_linear import expert_linear
from tests.products import covering, slow

LAYOUTS = [*product((torch.bfloat16, torch.float16, torch.float32), (False, True))]
"""Types, and whether weights are transposed."""
SHAPES = [(1, 1, 1), (3, 63, 5), (4, 64, 128), (5, 200, 130), (2, 96, 1024)]
"""[E, N, K]; the last is summed in ranges, and so is a quarter of its terms in float32."""
ROUTES = {
    "one slot": [2],
    "nobody visits some": [1, 1, 3, 1],
    "all to one": [1] * 37,
    "in turn": [*range(5)] * 5,
    "one more than a tile": [0] * 17 + [4] * 33 + [2],
}


def make(
    expert_ids: list[int],
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    is_transposed: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, bias and ids; an id beyond the experts begins again at 0."""
    num_experts, num_outputs, num_inputs = shape
    if (num_inputs, dtype, device.type) == (1024, torch.float32, "cpu"):  # few terms, as the interpreter is slow
        num_inputs, shape = 288, (num_experts, num_outputs, 288)
    generator = torch.Generator().manual_seed(len(expert_ids) + num_outputs + num_inputs)
    shapes = ((len(expert_ids), num_inputs), shape, (num_experts, num_outputs))
    x, weight, bias = (torch.randn(*part, generator=generator).to(dtype).to(device) for part in shapes)
    if is_transposed:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    return x, weight, bias, torch.tensor(expert_ids, device=device) % num_experts


def check(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, ids: torch.Tensor
) -> None:
    """At most one rounding of the result's type and one of float32 for each term of the sum."""
    exact = torch.einsum("sk,snk->sn", x.double(), weight.double()[ids])
    magnitude = torch.einsum("sk,snk->sn", x.double().abs(), weight.double().abs()[ids])
    if bias is not None:
        exact, magnitude = exact + bias.double()[ids], magnitude + bias.double().abs()[ids]
    num_terms = x.shape[1] + 1
    limit = torch.finfo(out.dtype).eps * exact.abs() + num_terms * torch.finfo(torch.float32).eps * magnitude
    assert out.dtype == x.dtype and bool(((out.double() - exact).abs() <= limit).all())


def test_a_row_goes_to_the_expert_it_names(device):
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    weight = torch.tensor([[[1.0, 0.0]], [[9.0, 9.0]], [[10.0, 1.0]]], device=device)
    ids = torch.tensor([2, 0, 2], device=device)
    bias = torch.tensor([[0.5], [9.0], [0.25]], device=device)
    with dispatch.override("reference"):
        assert expert_linear(x, weight, None, ids).tolist() == [[12], [3], [56]]
        assert expert_linear(x, weight, bias, ids).tolist() == [[12.25], [3.5], [56.25]]


@pytest.mark.parametrize(("shape", "layout"), covering(SHAPES, LAYOUTS, strength=1, ids=str))
def test_expert_product_is_right_to_rounding(shape, layout, device, takes_triton):
    dtype, is_transposed = layout
    for name, expert_ids in ROUTES.items():
        x, weight, bias, ids = make(expert_ids, shape, dtype, device, is_transposed)
        for given in (bias, None) if name == "in turn" else (bias,):
            with takes_triton():
                found = expert_linear(x, weight, given, ids)
            check(found, x, weight, given, ids)
        with dispatch.override("reference"):
            check(expert_linear(x, weight, bias, ids), x, weight, bias, ids)


@pytest.mark.parametrize(("shape", "layout"), covering([(5, 200, 130), (5, 60, 1024)], LAYOUTS, strength=1, ids=str))
def test_a_row_has_the_same_bits_in_any_company(shape, layout, device, takes_triton):
    dtype, is_transposed = layout
    # Interpreted, tiles of different heights are products of another library's, so the company stays within one height.
    companies = (1, 5, 37) if device.type == "cpu" else (1, 2, 5, 80, 81, 160, 161, 320, 321, 700)
    routes = torch.randint(5, (max(companies),), generator=torch.Generator().manual_seed(1)).tolist()
    x, weight, bias, ids = make(routes, shape, dtype, device, is_transposed)
    with takes_triton():
        together = expert_linear(x, weight, bias, ids)
        for num_slots in companies:
            for part in (slice(0, num_slots), slice(len(x) - num_slots, None)):
                assert torch.equal(expert_linear(x[part].contiguous(), weight, bias, ids[part].clone()), together[part])
        among_all = expert_linear(x, weight, bias, torch.where(ids == 3, 3, 1))  # other company, more and fewer
    assert torch.equal(among_all[ids == 3], together[ids == 3]) and torch.equal(among_all[ids == 1], together[ids == 1])


@pytest.mark.parametrize("num_slots", [64, 65, 129, 257, *slow(128, 256, 512, 513)])
def test_tiles_of_every_height_sum_every_term_once(num_slots, device, takes_triton):
    generator = torch.Generator().manual_seed(num_slots)
    num_inputs = 288 if device.type == "cpu" else 600  # both are summed in ranges
    sizes = (num_slots, num_inputs), (4, 70, num_inputs)
    x, weight = (torch.randint(-8, 9, size, generator=generator).float() for size in sizes)
    for ids in (torch.randint(4, (num_slots,), generator=generator), torch.full((num_slots,), 2)):
        exact = torch.einsum("sk,enk->sen", x, weight)[torch.arange(num_slots), ids]
        with takes_triton():  # whole numbers: no sum is rounded
            found = expert_linear(x.to(device), weight.to(device), None, ids.to(device))
        assert torch.equal(found.cpu(), exact)


@pytest.mark.parametrize("num_experts", [1, 2, 7, 8, 128])
def test_expert_linear_takes_any_number_of_experts(num_experts, device, takes_triton):
    ids = torch.randint(num_experts, (50,), generator=torch.Generator().manual_seed(num_experts)).tolist()
    x, weight, bias, expert_ids = make([*ids, num_experts - 1], (num_experts, 9, 20), torch.float32, device)
    with takes_triton():
        check(expert_linear(x, weight, bias, expert_ids), x, weight, bias, expert_ids)


@pytest.mark.gpu
def test_a_recording_follows_the_ids_it_is_replayed_on():
    x, weight, bias, ids = make([0] * 20, (4, 72, 96), torch.bfloat16, torch.device("cuda"))
    expert_linear(x, weight, bias, ids)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = expert_linear(x, weight, bias, ids)
    for route in ([3] * 20, [*range(4)] * 5, [1] * 19 + [2]):
        ids.copy_(torch.tensor(route))
        graph.replay()
        assert torch.equal(out, expert_linear(x, weight, bias, ids))


def test_bad_arguments_of_expert_linear_are_rejected():
    x, weight, bias, ids = make([0, 1, 2], (3, 5, 4), torch.float32, torch.device("cpu"))
    for arguments in (
        (x[0], weight, bias, ids),
        (x.double(), weight, bias, ids),
        (x[:0], weight, bias, ids[:0]),
        (x.T.contiguous().T, weight, bias, ids),
        (x, weight.half(), bias, ids),
        (x, weight[:, :, :3], bias, ids),
        (x, weight[:0], bias[:0], ids),
        (x, weight[0], bias, ids),
        (x, weight.to("meta"), None, ids),
        (x, weight, bias[:2], ids),
        (x, weight, bias, ids[:2]),
        (x, weight, bias, ids.int()),
        (x, weight, bias, ids + 1),
        (x, weight, bias, ids - 1),
    ):
        with pytest.raises(ValueError, match="must be"):
            expert_linear(*arguments)
