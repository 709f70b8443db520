"""Marlin's side of the products: its inputs, with doubles of the package, and its message without the package."""

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from betoken.bench.gpu.case import Case, measure
from betoken.bench.gpu.marlin import NAME
from betoken.bench.gpu.product_cases import product_cases

CPU = torch.device("cpu")
MARLIN = "vllm.model_executor.layers.quantization.utils.marlin_utils"


class Calls:
    """A timer that only calls."""

    def copy_bytes_per_s(self) -> float:
        return 1e9

    def time_ms(self, call: Callable[[], object], is_recordable: bool) -> float:
        call()
        return 1.0


def four_bit_case() -> Case:
    cases = product_cases(CPU, layers=((24, 256),), experts=((5, 24, 40),))
    return next(case for case in cases if case.shape.startswith("w4a16"))


def install_double(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0) -> None:
    """Its functions on GPTQ's own layout, which GPTQ's rule for codes, less eight, multiplies."""

    def apply(
        *, input: Tensor, weight: Tensor, weight_scale: Tensor, wtype: str, is_k_full: bool, **rest: object
    ) -> Tensor:
        assert (wtype, is_k_full) == ("eight is zero", True)
        assert rest["output_size_per_partition"] == 24 and rest["input_size_per_partition"] == 256
        codes = (weight[:, None] >> torch.arange(0, 32, 4)[:, None] & 15).flatten(0, 1)
        return input @ ((codes - 8) * weight_scale.repeat_interleave(128, 0) * factor).to(input.dtype)

    def repack(words: Tensor, order: Tensor, num_inputs: int, num_outputs: int, num_bits: int) -> Tensor:
        assert (order.numel(), num_inputs, num_outputs, num_bits) == (0, 256, 24, 4)
        assert words.shape == (32, 24) and words.dtype == torch.int32
        return words

    def permute(scales: Tensor, num_inputs: int, num_outputs: int, group: int) -> Tensor:
        assert scales.shape == (2, 24) and scales.is_contiguous() and (num_inputs, num_outputs, group) == (256, 24, 128)
        return scales

    contents = {
        "vllm": {},
        MARLIN: {
            "marlin_permute_scales": permute,
            "marlin_make_workspace_new": lambda device: torch.zeros(1),
            "apply_gptq_marlin_linear": apply,
        },
        "vllm._custom_ops": {"gptq_marlin_repack": repack},
        "vllm.scalar_type": {"scalar_types": SimpleNamespace(uint4b8="eight is zero")},
    }
    for name, functions in contents.items():
        module = ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)


def marlin_entry() -> object:
    return measure(four_bit_case(), Calls(), 1e9)["sides"][NAME]


def test_where_the_package_is_missing_its_name_stands_for_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)

    class Nowhere:
        """A finder that has no vllm, wherever it is installed."""

        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name.split(".")[0] == "vllm":
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere, *sys.meta_path])
    assert marlin_entry() == {"failed": "not installed: vllm"}


def test_the_package_is_given_codes_and_scales_that_make_the_same_product(monkeypatch: pytest.MonkeyPatch) -> None:
    install_double(monkeypatch)
    assert marlin_entry() == {"ms": 1.0, "fraction_of_floor": pytest.approx(0, abs=0.1)}


def test_another_product_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    install_double(monkeypatch, factor=1.1)
    entry = marlin_entry()
    assert isinstance(entry, dict) and entry["failed"].startswith("ValueError: another product: ")
