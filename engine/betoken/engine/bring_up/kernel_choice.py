"""Chooses by measurement which CPU kernels multiply a model's quantised weights, if several give the same bits.

The choice changes times only. It knows numbers of candidates and their names, not what they do.
"""

import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from betoken.engine.bring_up.kept import KeptResult
from betoken.engine.cpu.grouped_linear import PackedGroupedLinear
from betoken.engine.weights.experts import up_name
from betoken.kernels.build import BuildError
from betoken.kernels.cpu import INT8_NARROW_LIBRARY, CpuKernels, Products
from betoken.kernels.cpu.grouped import COLUMNS, PackedWeight

_LOG = logging.getLogger(__name__)
ROWS = (1, 6, 32)
"""Numbers of rows that are measured, one of each class (`Choices` of grouped_choice.h)."""
MIN_WEIGHT_BYTES = 1 << 20
"""Smaller weights of a model are not measured."""
_MAX_OUTPUTS = 512
_NUM_ROUNDS = 9
_WORTHWHILE = 0.95
"""A candidate replaces the reference only if it takes less than this part of its time."""
_WIDE = "512-bit vectors"


@dataclass(frozen=True, slots=True)
class MeasuredWeight:
    """A weight that stands for all of a model with its format."""

    products: Products
    weight: PackedWeight

    @property
    def key(self) -> str:
        """Name of the choices of this format."""
        return f"{self.products} {self.weight.code:#x}"

    @property
    def name(self) -> str:
        """For the log."""
        return f"{self.products} products of {self.weight.format_name}"


def fastest(times: Sequence[Sequence[float]]) -> int:
    """Return the index of the fastest candidate: 0 unless another one is clearly faster than candidate 0.

    Rounds are compared one by one, because a shared machine's speed changes from round to round.

    Args:
        times: of each candidate, one time per round; empty for candidates that are not to be used.
    """
    parts = [statistics.median(t / r for t, r in zip(own, times[0], strict=True)) if own else 1.0 for own in times]
    best = min(range(len(parts)), key=parts.__getitem__)
    return best if parts[best] < _WORTHWHILE else 0


def choose_kernels(model: Any, kernels: CpuKernels, kept: KeptResult | None) -> None:
    """Choose the kernels of all quantised layers of a packed model, by measurement or as an earlier start chose.

    Args:
        kept: result of an earlier start; None = measure, and keep nothing.
    """
    weights = {found.key: found for found in _weights(model) if found.weight.data.numel() >= MIN_WEIGHT_BYTES}
    if any(found.products == "int8" for found in weights.values()):
        _add_variants(kernels)
    before = (kept.read() if kept is not None else None) or {}
    names = {found.products: kernels.candidates(found.products) for found in weights.values()}
    chosen = {
        key: before[key] if _is_known(before.get(key), names[found.products]) else _measure(found, kernels, model.dtype)
        for key, found in weights.items()
    }
    for key, found in weights.items():
        for num_rows, name in zip(ROWS, chosen[key], strict=True):
            kernels.choose(found.products, found.weight.code, num_rows, names[found.products].index(name))
    if kept is not None and before | chosen != before:
        kept.write(before | chosen)


def _add_variants(kernels: CpuKernels) -> None:
    """Compile or load the int8 kernels for shorter vectors if this processor has both widths."""
    if kernels.candidates("int8")[0] == _WIDE:
        try:
            kernels.load_int8_variant(INT8_NARROW_LIBRARY)
        except (BuildError, OSError) as error:
            _LOG.info("int8 products in vectors of 256 bits are not compared: %s", error)


def _is_known(chosen: Any, names: Sequence[str]) -> bool:
    return isinstance(chosen, list) and len(chosen) == len(ROWS) and all(name in names for name in chosen)


def _weights(model: Any) -> Iterator[MeasuredWeight]:
    """The weights of a packed model's quantised layers; of a mixture's experts the first."""
    for module in model.modules():
        products: Products = "int8" if getattr(module, "rounds_rows", False) else "exact"
        if isinstance(module, PackedGroupedLinear):
            weight = PackedWeight(module.packed, module.num_outputs, module.num_inputs, module.format)
            yield MeasuredWeight(products, weight)
        elif hasattr(module, "format_down_proj"):
            for name in (up_name(module), "down_proj"):
                shape = (getattr(module, f"num_{name}"), getattr(module, f"num_inputs_{name}"))
                data = getattr(module, f"packed_{name}")[0]
                yield MeasuredWeight(products, PackedWeight(data, *shape, getattr(module, f"format_{name}")))


@torch.inference_mode()
def _measure(measured: MeasuredWeight, kernels: CpuKernels, dtype: torch.dtype) -> list[str]:
    """Return the name of the fastest candidate for each number of `ROWS`. Candidates with other bits are left out."""
    names, weight = kernels.candidates(measured.products), _first_outputs(measured.weight)
    operator = torch.ops.betoken.linear_int8 if measured.products == "int8" else torch.ops.betoken.linear_grouped
    chosen: list[str] = []
    for num_rows in ROWS:
        x = torch.randn(num_rows, weight.num_inputs, generator=torch.Generator().manual_seed(num_rows)).to(dtype)

        def run(candidate: int, x: Tensor = x) -> Tensor:
            kernels.choose(measured.products, weight.code, len(x), candidate)
            out: Tensor = operator(x, weight.data, None, weight.num_outputs, weight.code)
            return out

        times = _compare(run, names, f"{measured.name}, rows {num_rows},")
        chosen.append(names[fastest(times)])
        shown = ", ".join(f"{name} {min(own):.0f} us" for name, own in zip(names, times, strict=True) if own)
        _LOG.info("%s, rows %d: %s (%s)", measured.name, num_rows, chosen[-1], shown)
    return chosen


def _compare(run: Callable[[int], Tensor], names: Sequence[str], what: str) -> list[list[float]]:
    """Return the microseconds of each candidate in turn; none of a candidate whose bits differ, with a warning."""
    expected = run(0)
    usable = [torch.equal(run(candidate), expected) for candidate in range(len(names))]
    for name, is_equal in zip(names, usable, strict=True):
        if not is_equal:
            _LOG.warning("%s are not used: %s differ from %s", name, what, names[0])
    times: list[list[float]] = [[] for _ in names]
    for _ in range(_NUM_ROUNDS):
        for candidate, own in enumerate(times):
            if usable[candidate]:
                start = time.perf_counter()
                run(candidate)
                own.append(1e6 * (time.perf_counter() - start))
    return times


def _first_outputs(weight: PackedWeight) -> PackedWeight:
    """A part that a core's second cache holds."""
    num_groups = -(-weight.num_outputs // COLUMNS)
    num_outputs = min(weight.num_outputs, _MAX_OUTPUTS)
    part = weight.data[: weight.data.numel() // num_groups * -(-num_outputs // COLUMNS)]
    return PackedWeight(part, num_outputs, weight.num_inputs, weight.code)
