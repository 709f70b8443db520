"""Packed weights of an earlier start: a file for each checkpoint, which is mapped instead of packing the weights again.

Weights of layers that can be joined follow each other, so that joining them copies nothing. It knows formats and files,
not models.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from betoken.engine.bring_up.kept import machine_key
from betoken.engine.config import EngineConfig
from betoken.engine.cpu.grouped_linear import PackedGroupedEmbedding, PackedGroupedLinear
from betoken.engine.weights.packed import FindPacked
from betoken.kernels.code_folder import unfit_reason, user_cache_dir
from betoken.kernels.cpu.grouped import PackedGrouped, PackedWeight, code_of
from betoken.kernels.linear_grouped import Grouped

_LOG = logging.getLogger(__name__)
_MAGIC = b"betoken packed 1"
_LENGTH_BYTES = 8
_PAGE_BYTES = 4096
_LEAST_BYTES = 16 << 20
"""Smaller models are packed in less than a second."""
_MAX_BYTES = 32 << 30
"""Bytes of all files in a folder; the least recently used make room."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """A layer's packed weight [bytes], and its format: a weight on the meta device."""

    source: Grouped
    packed: Tensor


def find_packed(config: EngineConfig) -> FindPacked | None:
    """Return how to find packed weights for a model; None if its settings exclude them."""
    is_checked = config.self_check and config.reuse_self_check  # by its logits, which the packed weights must reproduce
    if not is_checked or config.device != "cpu" or config.ranks is not None or config.reads_step:
        return None
    return lambda fingerprint: PackedFile(config.cache_dir, fingerprint).read()


def keep_packed(config: EngineConfig, model: Any, fingerprint: str) -> None:
    """Keep the packed weights of a model, unless it uses kept ones."""
    kinds = (PackedGroupedLinear, PackedGroupedEmbedding)
    layers = {path: layer for path, layer in model.named_modules() if isinstance(layer, kinds)}
    if find_packed(config) is None or any(isinstance(layer.source, PackedGrouped) for layer in layers.values()):
        return
    PackedFile(config.cache_dir, fingerprint).write(
        {path: PackedLayer(layer.source, layer.packed) for path, layer in layers.items() if layer.source.order is None}
    )


class PackedFile:
    """The packed weights of one checkpoint in the cache directory."""

    def __init__(self, cache_dir: Path | None, fingerprint: str) -> None:
        """`fingerprint`: identifier of the weights."""
        self._folder = (cache_dir or user_cache_dir()) / "packed"
        self._path = self._folder / f"{machine_key(fingerprint)}.weights"

    def read(self) -> dict[str, PackedGrouped]:
        """Map the weights, by the path of their layer; empty without a whole file of this user."""
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_uid != os.getuid() or unfit_reason(self._folder.parent):
                    return {}
                header = _read_header(file)
                num_bytes = os.fstat(file.fileno()).st_size
                if header["num_bytes"] != num_bytes:
                    return {}
                os.posix_fadvise(file.fileno(), 0, num_bytes, os.POSIX_FADV_WILLNEED)
            data = torch.from_file(str(self._path), shared=False, size=num_bytes, dtype=torch.uint8)
            os.utime(self._path)
            return _weights(header["layers"], data)
        except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
            if not isinstance(error, FileNotFoundError):
                _LOG.warning("%s is not used: %s", self._path, error)
            return {}

    def write(self, layers: Mapping[str, PackedLayer]) -> None:
        """Keep the weights; a folder that does not take them only costs the next start its time."""
        places = _places(layers)
        num_bytes = max((at + layer.packed.numel() for at, layer in places.values()), default=0)
        if num_bytes < _LEAST_BYTES or num_bytes > _MAX_BYTES or unfit_reason(self._folder.parent):
            return
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._make_room(num_bytes)
            if shutil.disk_usage(self._folder).free < 2 * num_bytes:
                _LOG.warning("packed weights are not kept in %s: its disk has little room", self._folder)
                return
            _write(partial, places, num_bytes)
            partial.replace(self._path)
        except OSError as error:
            _LOG.warning("%s is not kept: %s", self._path, error)
        finally:
            partial.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the file; processes that have mapped it keep their weights."""
        self._path.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int) -> None:
        """Remove what killed processes left, and the least recently used files."""
        for path in self._folder.glob(".*"):
            if not _is_running(path.suffix):
                path.unlink(missing_ok=True)
        others = [(path.stat(), path) for path in self._folder.glob("*.weights") if path != self._path]
        left = _MAX_BYTES - num_bytes
        for status, path in sorted(others, key=lambda other: -other[0].st_mtime):
            left -= status.st_size
            if left < 0:
                path.unlink(missing_ok=True)


def _is_running(suffix: str) -> bool:
    return suffix[1:].isdigit() and Path("/proc", suffix[1:]).exists()


def _places(layers: Mapping[str, PackedLayer]) -> dict[str, tuple[int, PackedLayer]]:
    """Offset of each weight behind the header; tied ones share theirs."""
    places: dict[str, tuple[int, PackedLayer]] = {}
    known: dict[int, int] = {}
    end = 0
    for path, layer in layers.items():
        key = layer.packed.data_ptr()
        if key not in known:
            known[key] = end
            end += layer.packed.numel()
        places[path] = known[key], layer
    return places


def _write(path: Path, places: Mapping[str, tuple[int, PackedLayer]], num_bytes: int) -> None:
    described = {name: _described(at, layer) for name, (at, layer) in places.items()}
    digits = (1 + len(described)) * len(str(num_bytes))  # by which offsets may grow
    header = json.dumps({"num_bytes": 0, "layers": described}).encode()
    start = -(-(len(_MAGIC) + _LENGTH_BYTES + len(header) + digits) // _PAGE_BYTES) * _PAGE_BYTES
    for entry in described.values():
        entry["at"] += start
    header = json.dumps({"num_bytes": start + num_bytes, "layers": described}).encode()
    with path.open("wb") as file:
        os.chmod(path, 0o600)
        file.write(_MAGIC + len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for at, layer in places.values():
            if file.tell() <= start + at:
                file.seek(start + at)
                file.write(layer.packed.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _described(at: int, layer: PackedLayer) -> dict[str, Any]:
    source = layer.source
    tensors = {
        name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        for name, tensor in source.tensors().items()
    }
    fields = {"kind": source.kind, "num_inputs": source.num_inputs, "group": source.group, "zero": source.zero}
    return {"at": at, "num_bytes": layer.packed.numel(), "fields": fields, "tensors": tensors}


def _read_header(file: Any) -> dict[str, Any]:
    """Raises ValueError if it is malformed."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise ValueError("it is not a file of packed weights")
    found: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(_LENGTH_BYTES), "little")))
    return found


def _weights(layers: Mapping[str, Any], data: Tensor) -> dict[str, PackedGrouped]:
    found: dict[tuple[int, str], PackedGrouped] = {}
    return {path: _weight(described, data, found) for path, described in layers.items()}


def _weight(described: dict[str, Any], data: Tensor, found: dict[tuple[int, str], PackedGrouped]) -> PackedGrouped:
    key = described["at"], json.dumps(described["fields"])
    if key not in found:
        tensors: dict[str, Any] = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (dtype, shape) in described["tensors"].items()
        }
        source = Grouped(**described["fields"], **tensors)
        end = described["at"] + described["num_bytes"]
        if not 0 <= described["at"] <= end <= data.numel():
            raise ValueError(f"bytes [{described['at']}, {end}) of {data.numel()}")
        packed = PackedWeight(data[described["at"] : end], *source.shape, code_of(source))
        found[key] = PackedGrouped(**described["fields"], **tensors, packed=packed)
    return found[key]
