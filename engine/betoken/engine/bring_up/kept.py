"""Results of a start that later starts of the same model, code and machine need not compute again.

They are JSON files next to compiled code. It knows what a key must name of the machine, not what results say.
"""

import hashlib
import json
import logging
import os
import platform
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers

from betoken import engine, kernels
from betoken.common import gguf
from betoken.engine.weights.fingerprint import hash_sources
from betoken.kernels.build import BuildError, cpu_isa, native_target
from betoken.kernels.code_folder import private_folder, user_cache_dir
from betoken.kernels.cpu import LIBRARY

_LOG = logging.getLogger(__name__)
_VARIABLES = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS"),
    *("DNNL_MAX_CPU_ISA", "ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
)
"""Environment by which math libraries select their code."""
_MAX_KEPT = 256
"""Results in one folder; the oldest make room."""
_PROCESSOR = ("model name", "flags", "Features", "CPU part")
"""Lines of /proc/cpuinfo that describe a processor."""


class KeptResult:
    """One result in the cache directory, under a key of all that it depends on."""

    def __init__(self, cache_dir: Path | None, kind: str, *key: object) -> None:
        """`key`: what the result depends on besides code, versions, processor and number of threads."""
        name = f"{kind}-{machine_key(torch.get_num_threads(), *key)}.json"
        self._path = private_folder(cache_dir or user_cache_dir()) / "kept" / name

    def read(self) -> Any:
        """The result; None without one, or if the file is malformed."""
        try:
            return json.loads(self._path.read_text())
        except (OSError, ValueError):
            return None

    def write(self, result: Any) -> None:
        """Keep a result; a folder that takes no file only costs the next start its time."""
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            partial.write_text(json.dumps(result))
            partial.replace(self._path)
            by_age = sorted(self._path.parent.glob("*.json"), key=lambda path: path.stat().st_mtime)
            for path in by_age[:-_MAX_KEPT]:
                path.unlink(missing_ok=True)
        except OSError as error:
            _LOG.warning("%s is not kept: %s", self._path, error)

    def forget(self) -> None:
        """Remove the result."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def machine_key(*key: object) -> str:
    """32 hex digits of a hash of `key`, code, versions and processor."""
    parts = json.dumps([_software(), _processor(), *key], sort_keys=True, default=str)
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


@lru_cache(maxsize=1)
def _software() -> list[str]:
    return [torch.__version__, transformers.__version__, hash_sources(gguf, engine, kernels)]


def _processor() -> list[object]:
    try:
        target = native_target(LIBRARY)
    except BuildError:
        target = ""
    lines: set[str] = set()
    with suppress(OSError):
        lines = {line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith(_PROCESSOR)}
    variables = [os.environ.get(name) for name in _VARIABLES]
    capability = torch.backends.cpu.get_cpu_capability()
    return [platform.machine(), sorted(lines), os.cpu_count(), capability, cpu_isa(), target, variables]
