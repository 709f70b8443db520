"""The operators that carry attention take what a layer says of its scores, field by field."""

import pytest
import torch

import betoken.engine.cuda.operators  # noqa: F401 (defines them)
from betoken.engine.attention import Scoring
from betoken.kernels.cpu import load_cpu_kernels


@pytest.mark.parametrize("namespace", ["betoken", "betoken_rows"])
def test_attention_takes_the_fields_of_a_scoring_in_their_order(namespace: str) -> None:
    if namespace == "betoken" and load_cpu_kernels() is None:
        pytest.skip("no compiler: the CPU kernel cannot be built here")
    arguments = getattr(torch.ops, namespace).attend.default._schema.arguments
    assert [argument.name for argument in arguments][-len(Scoring._fields) :] == list(Scoring._fields)
