"""The convolution over rings: torch's own sum, and the bits of a row however its text was cut, drafted and rejected."""

import pytest
import torch

from betoken.kernels import dispatch
from betoken.kernels.cpu.recurrent import load_recurrent_kernels
from betoken.kernels.state_conv import state_conv, state_conv_native, state_conv_reference
from tests.kernels.recurrences import Step, make_rows

IMPLEMENTATIONS = {"reference": state_conv_reference, "native": state_conv_native}


@pytest.fixture(params=IMPLEMENTATIONS)
def convolve(request: pytest.FixtureRequest):
    if request.param == "native" and load_recurrent_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    return IMPLEMENTATIONS[request.param]


def make_case(num_tokens: int, num_taps: int, num_channels: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    sizes = [(num_tokens, num_channels), (num_taps, num_channels), (num_channels,), (3, 12, num_channels)]
    x, weight, bias, ring = (torch.randn(*size, generator=generator).to(dtype) for size in sizes)
    return x, weight, bias, ring


@pytest.mark.parametrize(("num_taps", "num_channels"), [(4, 33), (1, 16), (3, 1), (12, 40)])
def test_state_conv_rows_equal_torchs_sum(convolve, num_taps: int, num_channels: int) -> None:
    x, weight, bias, ring = make_case(30, num_taps, num_channels, torch.float32)
    out = convolve(x, weight, bias, ring, make_rows([Step(1, 0, 0, 30, 30)]))
    own = torch.nn.functional.conv1d(x.T[None], weight.T[:, None], bias, padding=num_taps - 1, groups=num_channels)[
        0, :, :30
    ].T
    torch.testing.assert_close(out, own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(1, 2, 9, 10, 30), (30,), (25, 26, 30)])
def test_a_state_conv_row_has_the_same_bits_in_any_chunks(convolve, cuts, dtype: torch.dtype) -> None:
    x, weight, bias, ring = make_case(30, 4, 20, dtype)
    whole = convolve(x, weight, bias, ring.clone(), make_rows([Step(0, 0, 0, 30, 30)]))
    begin = 0
    for end in cuts:  # with a different neighbour each time
        rows = make_rows([Step(2, 0, 0, 5, 5), Step(1, begin, begin, end - begin, end)])
        assert torch.equal(convolve(torch.cat([x[:5], x[begin:end]]), weight, bias, ring, rows)[5:], whole[begin:end])
        begin = end


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_conv_node_has_the_bits_of_its_path_as_a_chain(convolve, dtype: torch.dtype) -> None:
    x, weight, bias, ring = make_case(20, 4, 20, dtype)
    parents = (-1, 0, -1, 2, 1, 3)
    convolve(x[:9], weight, bias, ring, make_rows([Step(1, 0, 0, 9, 9)]))
    out = convolve(x[9:16], weight, bias, ring, make_rows([Step(1, 9, 9, 7, 10, parents)]))
    for node in range(len(parents)):
        path, at = [], node
        while at >= 0:
            path.insert(0, 10 + at)
            at = parents[at]
        chain = torch.cat([x[:10], x[path]])
        alone = convolve(chain, weight, bias, ring.clone(), make_rows([Step(0, 0, 0, len(chain), len(chain))]))
        assert torch.equal(out[1 + node], alone[-1])


def test_the_cpu_state_conv_is_used_and_rounds_as_the_reference() -> None:
    if load_recurrent_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    x, weight, bias, ring = make_case(20, 4, 24, torch.bfloat16)
    rows = make_rows([Step(0, 3, 5, 8, 6), Step(2, 0, 0, 12, 12)])
    ours, theirs = ring.clone(), ring.clone()
    with dispatch.recording() as taken:
        out = state_conv(x, weight, None, ours, rows)
    assert taken == ["native"]
    assert torch.equal(out, state_conv_reference(x, weight, None, theirs, rows)) and torch.equal(ours, theirs)


@pytest.mark.parametrize(("ring", "message"), [((1, 2, 8), "needs 3"), ((1, 8, 7), "ring")])
def test_state_conv_shapes_that_do_not_fit_are_rejected(ring: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_conv(torch.zeros(1, 8), torch.zeros(4, 8), None, torch.zeros(ring), make_rows([Step(0, 0, 0, 1, 1)]))


def test_strided_state_conv_rows_have_the_same_bits(convolve) -> None:
    x, weight, bias, ring = make_case(9, 4, 20, torch.bfloat16)
    part, others = torch.cat([x, x], dim=1)[:, 20:], ring.clone()
    rows = make_rows([Step(1, 0, 0, 9, 7)])
    assert torch.equal(convolve(part, weight, bias, ring, rows), convolve(x, weight, bias, others, rows))
    assert torch.equal(ring, others)
