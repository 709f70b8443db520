"""One measured case of an op: fresh inputs, ours against the reference, and who else is timed on the same inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from betoken.bench.gpu.poison import poisoned
from betoken.bench.gpu.timing import Timer
from betoken.kernels import dispatch

Arguments = Sequence[Any]
Outputs = Sequence[torch.Tensor]

_NUM_GATE_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Side:
    """Another way to compute the same, or what the field uses instead."""

    name: str
    call: Callable[..., object]
    is_recordable: bool = True
    """Whether it can be replayed as a graph: it reads nothing of the device on the host."""


@dataclass(frozen=True, slots=True)
class Case:
    """An op at one shape."""

    op: str
    shape: str
    num_bytes: int
    """Each input read once and each output written once: what the op cannot do without."""
    fresh: Callable[[], Arguments]
    """New random inputs."""
    run: Callable[..., Outputs]
    """The op; tensors it changes are among its outputs."""
    tolerance: float = 0.0
    """Largest difference from the reference, as a part of the reference's largest value; 0: the same bits."""
    others: Sequence[Side] = field(default=())


def find_fault(case: Case) -> str | None:
    """The fault of the Triton path on fresh random inputs and poisoned memory; None if there is none."""
    for _ in range(_NUM_GATE_ROUNDS):
        arguments = case.fresh()
        with dispatch.override("reference"):
            expected = case.run(*_copied(arguments))
        with poisoned(), dispatch.override("triton"), dispatch.recording() as taken:
            ours = case.run(*_copied(arguments))
        if set(taken) != {"triton"}:
            return f"the paths taken were {', '.join(sorted(set(taken)))}"
        for index, (found, wanted) in enumerate(zip(ours, expected, strict=True)):
            if reason := _difference(found, wanted, case.tolerance):
                return f"output {index}: {reason}"
    return None


def measure(case: Case, timer: Timer, copy_bytes_per_s: float) -> dict[str, Any]:
    """Times of our kernel and of the other sides; a side that cannot run is listed with its reason."""
    floor_ms = case.num_bytes / copy_bytes_per_s * 1000
    arguments = case.fresh()
    sides: dict[str, Any] = {}
    for side in (Side("betoken", case.run), *case.others):
        try:
            time_ms = timer.time_ms(partial(side.call, *arguments), side.is_recordable)
        except Exception as error:  # another's package, another's compiler: its failure is an entry, not the end
            if side.call is case.run:
                raise
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, ModuleNotFoundError):
                reason = f"not installed: {error.name}"
            sides[side.name] = {"failed": reason[:200]}
            continue
        sides[side.name] = {"ms": round(time_ms, 5), "fraction_of_floor": round(floor_ms / time_ms, 3)}
    return {
        "op": case.op,
        "shape": case.shape,
        "num_bytes": case.num_bytes,
        "floor_ms": round(floor_ms, 5),
        "sides": sides,
    }


def reference_sides(run: Callable[..., Any], reference: Callable[..., Any] | None = None) -> list[Side]:
    """The op's own torch reference: eager, and compiled if given separately. Neither runs as a recorded graph,
    since references may read the device on the host."""

    def eager(*arguments: Any) -> Any:
        with dispatch.override("reference"):
            return run(*arguments)

    sides = [Side("torch eager", eager, is_recordable=False)]
    if reference is not None:
        sides.append(Side("compiled reference", lazily_compiled(reference), is_recordable=False))
    return sides


def lazily_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled at its first call, which warms up and is not timed."""
    compiled: list[Callable[..., Any]] = []

    def call(*arguments: Any) -> Any:
        if not compiled:
            compiled.append(torch.compile(function, dynamic=False))
        return compiled[0](*arguments)

    return call


def _copied(arguments: Arguments) -> list[Any]:
    """Ops change tensors in place: each path gets its own."""
    return [argument.clone() if isinstance(argument, torch.Tensor) else argument for argument in arguments]


def _difference(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> str | None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{list(found.shape)} {found.dtype}, expected {list(expected.shape)} {expected.dtype}"
    if tolerance == 0.0:
        num_different = int((found != expected).sum())
        return f"{num_different} of {found.numel()} entries differ" if num_different else None
    limit = tolerance * expected.float().abs().max().item()
    difference = (found.float() - expected.float()).abs().max().item()
    return None if difference <= limit else f"differs by {difference:.3g}, limit {limit:.3g}"  # NaN is beyond it
