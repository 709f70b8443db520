"""The CPU kernels in C: compiled by the machine's own compiler on first use or by `load`, cached, loaded with ctypes.

Without a compiler `is_available()` is False and the torch references run instead, with the same bits. It knows no op's
contract: arguments are validated by the ops.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import torch

from betoken.kernels.build import BuildError, Library, build

_logger = logging.getLogger(__name__)

LIBRARY = Library(
    name="native-kernels",
    source=Path(__file__).with_name("kernels.c"),
    headers=(),
    compiler_variable="CC",
    compilers=("cc", "gcc", "clang"),
    # Contraction into fused multiply-adds is off: the bits are part of the contract.
    flags=("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
    links=("-lm",),
)


_cache_dir: Path | None = None


def load(cache_dir: Path | None = None) -> None:
    """Have the library now, so that no request waits for a compiler; in `cache_dir`, or else the user's cache."""
    global _cache_dir
    _cache_dir = cache_dir
    is_available()


def is_available() -> bool:
    """Whether the library is there; the first call compiles it (a second or more) or finds it in the cache."""
    return _library() is not None


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int, stream: int) -> torch.Tensor:
    """`noise.gumbel` for validated CPU tensors."""
    out = torch.empty((seeds.shape[0], vocab_size), dtype=torch.float32)
    _loaded().betoken_gumbel(
        seeds.shape[0],
        vocab_size,
        seeds.data_ptr(),
        positions.data_ptr(),
        stream,
        out.data_ptr(),
    )
    return out


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """`sample.greedy` for validated CPU tensors."""
    if logits.dtype == torch.float16:
        logits = logits.to(torch.float32)
    num_rows, vocab_size = logits.shape
    scratch = torch.empty(vocab_size, dtype=torch.float32)
    out = torch.empty(num_rows, dtype=torch.int64)
    is_bfloat16 = logits.dtype == torch.bfloat16
    _loaded().betoken_greedy(num_rows, vocab_size, logits.data_ptr(), is_bfloat16, scratch.data_ptr(), out.data_ptr())
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
    _loaded().betoken_sample(
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


def perturbed_top(
    logits: torch.Tensor,
    num_top: int,
    scale: float,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`perturbed.perturbed_top` for validated CPU tensors."""
    if logits.dtype == torch.float16:
        logits = logits.to(torch.float32)
    num_rows, vocab_size = logits.shape
    scratch = torch.empty(5 * vocab_size, dtype=torch.float32)
    weights = torch.empty(vocab_size, dtype=torch.int64)
    ids = torch.empty((num_rows, min(num_top, vocab_size)), dtype=torch.int64)
    log_shares = torch.empty(ids.shape, dtype=torch.float32)
    _loaded().betoken_perturbed_top(
        num_rows,
        vocab_size,
        ids.shape[1],
        scale,
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
        ids.data_ptr(),
        log_shares.data_ptr(),
    )
    return ids, log_shares


def logits_adjust(
    logits: torch.Tensor,
    row_offsets: torch.Tensor,
    ids: torch.Tensor,
    bias: torch.Tensor,
    scale: torch.Tensor,
    penalty: torch.Tensor,
    allowed: torch.Tensor | None,
) -> None:
    """`logits_adjust.logits_adjust` for validated CPU tensors.

    Raises:
        ValueError: an offset or an id is out of range.
    """
    status = _loaded().betoken_logits_adjust(
        *logits.shape,
        logits.data_ptr(),
        row_offsets.data_ptr(),
        ids.shape[0],
        ids.data_ptr(),
        bias.data_ptr(),
        scale.data_ptr(),
        penalty.data_ptr(),
        None if allowed is None else allowed.data_ptr(),
    )
    if status != 0:
        raise ValueError(f"row_offsets must go from 0 to {ids.shape[0]}, ids must be 0 to {logits.shape[1] - 1}")


def _loaded() -> ctypes.CDLL:
    library = _library()
    if library is None:
        raise RuntimeError("the native kernels are not available: no working C compiler on this machine")
    return library


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    try:
        library = ctypes.CDLL(str(build(LIBRARY, _cache_dir)))
    except (BuildError, OSError) as error:
        _logger.warning("the native kernels are not available, their torch references run instead: %s", error)
        return None
    integer, pointer, word = ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32
    library.betoken_gumbel.argtypes = [integer, integer, pointer, pointer, ctypes.c_uint32, pointer]
    library.betoken_gumbel.restype = None
    library.betoken_greedy.argtypes = [integer, integer, pointer, word, pointer, pointer]
    library.betoken_greedy.restype = None
    library.betoken_sample.argtypes = [integer, integer, pointer, word, *[pointer] * 9]
    library.betoken_sample.restype = None
    library.betoken_perturbed_top.argtypes = [
        *(integer, integer, integer, ctypes.c_float, pointer, word),
        *[pointer] * 10,
    ]
    library.betoken_perturbed_top.restype = None
    library.betoken_logits_adjust.argtypes = [integer, integer, pointer, pointer, integer, *[pointer] * 5]
    library.betoken_logits_adjust.restype = ctypes.c_int32
    return library
