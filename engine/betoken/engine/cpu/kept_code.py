"""The compiled forward of an earlier start, which is loaded without tracing the model.

The function takes the weights as arguments; a file lists them by their names in the model. It knows tensors and names,
not layers.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from betoken.engine.compiled import TensorCall, load_artifact
from betoken.kernels.code_folder import unfit_reason

_LOG = logging.getLogger(__name__)
_MAX_VALUE_BYTES = 4 << 20
"""Limit for the bytes of tensors other than the model's weights, such as constants."""
_MAX_KEPT = 64
"""Functions in one folder; the oldest make room."""


class KeptCode:
    """File of one compiled forward, and a list of its arguments."""

    def __init__(self, cache_dir: Path, key: str) -> None:
        """`key`: identifies model, settings, code and processor."""
        self.is_readable = False
        """Whether an earlier start's code may be loaded."""
        folder = cache_dir / "compiled"
        self._code, self._arguments = folder / f"{key}.code", folder / f"{key}.arguments"

    def load(self, model: nn.Module, options: dict[str, Any], cache_dir: Path) -> TensorCall | None:
        """The function over the weights of `model`, some of which are joined; None without one.

        Args:
            options: options of inductor that it was compiled with.
        """
        if not self.is_readable or not self._arguments.is_file() or unfit_reason(self._code.parent.parent):
            return None
        try:
            artifact = load_artifact(self._code, options, cache_dir)
            arguments = [_argument(model, saved) for saved in torch.load(self._arguments, weights_only=True)]
        except Exception as error:  # the loader raises many types; the model is then traced
            _LOG.warning("%s is not used: %s: %s", self._code, type(error).__name__, error)
            return None

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            return tuple(artifact(*arguments, *tensors))

        return run

    def keep(self, model: nn.Module, graph: fx.GraphModule, artifact: Any) -> None:
        """Keep a function that inductor made of a graph over the weights of `model`."""
        names = _Names(model)
        tensors = [*graph.parameters(), *graph.buffers()]
        arguments = [names.of(tensor) or tensor.detach().clone() for tensor in tensors]
        value_bytes = sum(saved.nbytes for saved in arguments if isinstance(saved, Tensor))
        folder = self._code.parent
        if value_bytes > _MAX_VALUE_BYTES or not artifact.is_saveable() or unfit_reason(folder.parent):
            return
        partial = self._arguments.with_name(f".{self._arguments.name}.{os.getpid()}")
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            artifact.save(path=str(self._code), format="binary")
            torch.save(arguments, partial)
            partial.replace(self._arguments)
            by_age = sorted(folder.glob("*.code"), key=lambda path: path.stat().st_mtime)
            for path in by_age[:-_MAX_KEPT]:
                path.with_suffix(".arguments").unlink(missing_ok=True)
                path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("%s is not kept: %s", self._code, error)


def join(modules: Sequence[Any], name: str) -> Tensor:
    """One tensor of the modules' tensors `name` [n], which are parts of it from then on; a copy unless they were."""
    tensors: list[Tensor] = [getattr(module, name).detach() for module in modules]
    joined = _as_one(tensors)
    start = 0
    for module in modules:
        own = getattr(module, name)
        part = joined[start : start + own.numel()]
        if isinstance(own, nn.Parameter):
            own.data = part
        else:
            setattr(module, name, part)
        start += own.numel()
    return joined


def _as_one(tensors: list[Tensor]) -> Tensor:
    first, end = tensors[0], tensors[0].data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(tensors)
        end += tensor.nbytes
    return first.as_strided((sum(tensor.numel() for tensor in tensors),), (1,))


class _Names:
    """Finds a model's tensors by their memory."""

    def __init__(self, model: nn.Module) -> None:
        self._by_place: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in _tensors(model):
            self._by_place.setdefault(tensor.data_ptr(), []).append((name, tensor))

    def of(self, wanted: Tensor) -> list[str] | None:
        """Names of the tensors that are this one, one after the other; None if there are none."""
        for name, tensor in self._by_place.get(wanted.data_ptr(), []):
            if _form(tensor) == _form(wanted):
                return [name]
        found: list[str] = []
        place, end = wanted.data_ptr(), wanted.data_ptr() + wanted.nbytes
        while place < end:
            parts = [
                (name, tensor)
                for name, tensor in self._by_place.get(place, [])
                if tensor.dtype == wanted.dtype and tensor.dim() == wanted.dim() == 1 and tensor.nbytes
            ]
            if not parts:
                return None
            name, tensor = parts[0]
            found.append(name)
            place += tensor.nbytes
        return found if place == end and len(found) > 1 else None


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _argument(model: nn.Module, saved: list[str] | Tensor) -> Tensor:
    """A tensor of the function: a value, a tensor of the model, or several of them joined."""
    if isinstance(saved, Tensor):
        return saved
    places = [name.rpartition(".") for name in saved]
    owners = [model.get_submodule(path) for path, _, _ in places]
    if len(owners) == 1:
        found: Tensor = getattr(owners[0], places[0][2])
        return found
    return join(owners, places[0][2])
