"""The CPU kernels in C: compiled by the machine's own compiler on first use, cached, loaded with ctypes.

Where there is no compiler `is_available()` is False and the torch references run instead, with the same bits. It knows
no op's contract: arguments are validated by the ops.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

_logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("kernels.c")
# No contraction into fused multiply-adds: the bits are part of the contract.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 60


def is_available() -> bool:
    """Whether the library is there; the first call compiles it (about half a second) or finds it in the cache."""
    return _library() is not None


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """`noise.gumbel` for validated CPU tensors."""
    out = torch.empty((seeds.shape[0], vocab_size), dtype=torch.float32)
    _loaded().foretoken_gumbel(
        seeds.shape[0],
        vocab_size,
        seeds.contiguous().data_ptr(),
        positions.contiguous().data_ptr(),
        stream,
        out.data_ptr(),
    )
    return out


def sample(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """`sample.sample` for validated CPU tensors."""
    if logits.dtype == torch.float16:
        logits = logits.to(torch.float32)
    num_rows, vocab_size = logits.shape
    scratch = torch.empty(4 * vocab_size, dtype=torch.float32)
    weights = torch.empty(vocab_size, dtype=torch.int64)
    out = torch.empty(num_rows, dtype=torch.int64)
    _loaded().foretoken_sample(
        num_rows,
        vocab_size,
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        seeds.data_ptr(),
        positions.data_ptr(),
        temperature.data_ptr(),
        top_k.data_ptr(),
        top_p.data_ptr(),
        min_p.data_ptr(),
        scratch.data_ptr(),
        weights.data_ptr(),
        out.data_ptr(),
    )
    return out


def logits_adjust(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    penalty: torch.Tensor,
    allowed: torch.Tensor | None,
) -> torch.Tensor:
    """`logits_adjust.logits_adjust` for validated CPU tensors.

    Raises:
        ValueError: an offset or an id is out of range.
    """
    if logits.dtype == torch.float16:
        logits = logits.to(torch.float32)
    out = torch.empty(logits.shape, dtype=torch.float32)
    status = _loaded().foretoken_logits_adjust(
        *logits.shape,
        logits.data_ptr(),
        logits.dtype == torch.bfloat16,
        row_offsets.data_ptr(),
        ids.shape[0],
        ids.data_ptr(),
        bias.data_ptr(),
        scale.data_ptr(),
        penalty.data_ptr(),
        None if allowed is None else allowed.data_ptr(),
        out.data_ptr(),
    )
    if status != 0:
        raise ValueError(f"row_offsets must go from 0 to {ids.shape[0]}, ids must be 0 to {logits.shape[1] - 1}")
    return out


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("the native kernels are not available: no working C compiler on this machine")
    return library


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        _logger.info("no C compiler found: noise and sampling run on their torch references")
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, subprocess.SubprocessError) as error:
        _logger.warning("compiling the native kernels failed (%s): the torch references run instead", error)
        return None
    integer, pointer, word = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
    library.foretoken_gumbel.argtypes = [integer, integer, pointer, pointer, ctypes.c_uint32, pointer]
    library.foretoken_gumbel.restype = None
    library.foretoken_sample.argtypes = [integer, integer, pointer, word, *[pointer] * 9]
    library.foretoken_sample.restype = None
    library.foretoken_logits_adjust.argtypes = [integer, integer, pointer, word, pointer, integer, *[pointer] * 6]
    library.foretoken_logits_adjust.restype = ctypes.c_int32
    return library


def _compiled(compiler: str) -> Path:
    """Path of the shared library, compiled unless the cache has it for this source, compiler and processor."""
    identity = "\n".join((_SOURCE.read_text(), compiler, " ".join(_FLAGS), platform.machine(), _processor()))
    name = f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:16]}.so"
    path = _cache_folder() / name
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            built = Path(folder) / name
            subprocess.run(
                [compiler, *_FLAGS, "-o", str(built), str(_SOURCE), "-lm"],
                check=True,
                capture_output=True,
                timeout=_COMPILE_TIMEOUT_S,
            )
            os.replace(built, path)  # atomic: several processes may build at once
    return path


def _cache_folder() -> Path:
    """A folder of this user's alone; loading code from one that others can write would be a hole."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "foretoken"
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = base.stat()
        if os.access(base, os.W_OK) and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return base
    except (OSError, RuntimeError):
        pass
    return Path(tempfile.mkdtemp(prefix="foretoken-"))


def _processor() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))
