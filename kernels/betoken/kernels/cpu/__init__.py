"""The CPU kernels in C++: linear layers with packed weights, paged attention and convolution, and their thread pool.

They are torch operators `torch.ops.betoken.*` plus a few plain C functions. Loading them compiles them once.
"""

import ctypes
import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from betoken.kernels.build import BuildError, Library, build

__all__ = ["CPU_DTYPES", "GROUP_COLUMNS", "LIBRARY", "CpuCache", "CpuKernels", "load_cpu_kernels"]

_LOG = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_HEADERS = tuple(sorted(_FOLDER.glob("*.h")))


def _library(name: str, source: str, headers: tuple[Path, ...], *flags: str) -> Library:
    return Library(
        name=name,
        source=_FOLDER / source,
        headers=headers,
        compiler_variable="CXX",
        compilers=("g++", "c++"),
        flags=("-std=c++20", "-Wno-psabi", "-pthread", f"-isystem{_TORCH / 'include'}", *flags),
        links=(f"-L{_TORCH / 'lib'}", "-ltorch_cpu", "-lc10"),
    )


_RECURRENT = {path for path in _HEADERS if "recurren" in path.name or path.name.startswith("state_")}
_INT8 = {path for path in _HEADERS if path.name.startswith("int8_")}
_INT8_READS = (
    *("grouped.h", "grouped_bytes.h", "grouped_ends.h", "grouped_product.h", "linear.h", "linear_grouped_job.h"),
    *("grouped_choice.h", "pool.h", "simd.h", "tensors.h"),
)

LIBRARY = _library(
    "cpu-kernels",
    "ops.cpp",
    tuple(path for path in _HEADERS if "grouped" not in path.name and path not in _RECURRENT | _INT8),
)
GROUPED_LIBRARY = _library(
    "grouped-cpu-kernels", "ops_grouped.cpp", tuple(path for path in _HEADERS if path not in _RECURRENT | _INT8)
)
"""Operators on weights of few bits. Compiling them takes four times as long, so only models that need them wait."""
INT8_LIBRARY = _library(
    "int8-cpu-kernels",
    "ops_int8.cpp",
    (*(path for path in _HEADERS if path.name in _INT8_READS), *sorted(_INT8)),
    "-ffp-contract=off",
)
"""Operators on weights of few bits and rows rounded to int8. Without fused products every processor rounds alike."""
INT8_NARROW_LIBRARY = replace(
    INT8_LIBRARY,
    name="int8-narrow-cpu-kernels",
    source=_FOLDER / "int8_variants.cpp",
    flags=(
        *(*INT8_LIBRARY.flags, "-fvisibility=hidden", "-DBETOKEN_NARROW", "-mno-avx512bf16"),
        *("-mno-amx-bf16", "-mno-amx-int8", "-mno-amx-tile"),
    ),
    links=(),
)
"""The int8 kernels in vectors of 256 bits with the instructions of AVX512."""
RECURRENT_LIBRARY = _library(
    "recurrent-cpu-kernels", "ops_recurrent.cpp", (_FOLDER / "pool.h", _FOLDER / "simd.h", *sorted(_RECURRENT))
)
"""Operators on recurrent states, for the models that have them."""

Products = Literal["exact", "int8"]
"""Products of weights of few bits, by what happens to rows."""
_MAX_CANDIDATES = 16
_LIBRARIES: Mapping[Products, Library] = {"exact": GROUPED_LIBRARY, "int8": INT8_LIBRARY}

CPU_DTYPES = (torch.bfloat16, torch.float32)
"""Element types of the kernels; sums are always float32."""

GROUP_COLUMNS = 64
"""Packed weights may be joined if they end on a whole group of columns (kGroup of linear.h)."""


class CpuKernels:
    """The loaded library."""

    def __init__(self, library: Path, cache_dir: Path | None = None) -> None:
        self._cache_dir = cache_dir
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        self._library = ctypes.CDLL(str(library))
        self._library.betoken_cache_create.restype = ctypes.c_void_p
        self._library.betoken_cache_create.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p]
        self._library.betoken_cache_destroy.argtypes = [ctypes.c_void_p]
        self._library.betoken_pool.restype = ctypes.c_void_p
        self._library.betoken_products.restype = ctypes.c_char_p
        self._library.betoken_compiler.restype = ctypes.c_char_p
        self._begin_step = self._library.betoken_begin_step
        self._begin_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
        _register_shapes()
        _register_shapes_of_states()

    @property
    def products(self) -> str:
        """How bf16 products run: "tile" registers (AMX), "dot" products of pairs (AVX512-BF16) or float "vector"s."""
        name: bytes = self._library.betoken_products()
        return name.decode()

    @property
    def compiler(self) -> str:
        """Name and version of the compiler that made them; it chooses which products and sums round once."""
        name: bytes = self._library.betoken_compiler()
        return name.decode().strip()

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of one operator, the calling one included; for the whole process."""
        self._library.betoken_set_num_threads(num_threads)

    def load_grouped(self) -> None:
        """Load the operators on weights of few bits; compiled on first use.

        Raises:
            BuildError, OSError: that is impossible.
        """
        self._load_operators(GROUPED_LIBRARY, "betoken_share_pool")

    def load_int8(self) -> None:
        """Load the operators on weights of few bits and rows rounded to int8; compiled on first use.

        Raises:
            BuildError, OSError: that is impossible.
        """
        self._load_operators(INT8_LIBRARY, "betoken_share_int8_pool")

    def _load_operators(self, library: Library, share_name: str) -> None:
        """Load operators that run on this library's threads; `share_name`: the function that takes them."""
        with _lock:
            if library.name not in _loaded_operators:
                path = build(library, self._cache_dir)
                loaded = ctypes.CDLL(str(path))
                share = getattr(loaded, share_name)
                share.argtypes = [ctypes.c_void_p]
                share(self._library.betoken_pool())
                torch.ops.load_library(path)  # type: ignore[no-untyped-call]
                _loaded_operators[library.name] = loaded

    def load_int8_variant(self, library: Library) -> None:
        """Add a library's candidates to the int8 products; compiled on first use. `load_int8` comes first.

        Raises:
            BuildError, OSError: that is impossible.
        """
        with _lock:
            if library.name not in _loaded_operators:
                loaded = ctypes.CDLL(str(build(library, self._cache_dir)))
                _loaded_operators[INT8_LIBRARY.name].betoken_int8_add(loaded.betoken_int8_variants)
                _loaded_operators[library.name] = loaded

    def candidates(self, products: Products) -> list[str]:
        """Names of the kernels for quantised weights that this processor executes, the reference first. All have to
        give the same bits. The products' operators are loaded."""
        library = _loaded_operators[_LIBRARIES[products].name]
        name_of = getattr(library, f"betoken_{products}_candidate")
        name_of.restype = ctypes.c_char_p
        return [name.decode() for index in range(_MAX_CANDIDATES) if (name := name_of(index))]

    def choose(self, products: Products, code: int, num_rows: int, candidate: int) -> None:
        """Let products with weights of this kind of code use a candidate for numbers of rows like this one: 1, up to 8,
        or more. `code`: see `PackedWeight`."""
        function = getattr(_loaded_operators[_LIBRARIES[products].name], f"betoken_{products}_choose")
        function.argtypes = [ctypes.c_int64, ctypes.c_int64, ctypes.c_int]
        function(code, num_rows, candidate)

    def load_recurrent(self) -> ctypes.CDLL:
        """Load the operators on recurrent states; compiled on first use.

        Raises:
            BuildError, OSError: that is impossible.
        """
        path = build(RECURRENT_LIBRARY, self._cache_dir)
        library = ctypes.CDLL(str(path))
        library.betoken_share_recurrent_pool.argtypes = [ctypes.c_void_p]
        library.betoken_share_recurrent_pool(self._library.betoken_pool())
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
        return library

    def create_cache(self, keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> "CpuCache":
        """Make the KV tensors of layers 0, 1, ... known: [num_pages, page_size, heads, size], kept alive."""
        return CpuCache(self, keys, values)


class CpuCache:
    """A model's KV tensors as the kernels see them."""

    def __init__(self, kernels: CpuKernels, keys: Mapping[int, Tensor], values: Mapping[int, Tensor]) -> None:
        if sorted(keys) != list(range(len(keys))) or sorted(values) != sorted(keys):
            raise ValueError(f"layers must be 0, 1, ...: {sorted(keys)}, {sorted(values)}")
        self._kernels = kernels
        self._tensors = [(keys[layer], values[layer]) for layer in range(len(keys))]
        numbers = np.array(
            [
                [key.data_ptr(), value.data_ptr(), key.shape[2], key.shape[3], value.shape[3]]
                for key, value in self._tensors
            ],
            np.int64,
        )
        first = self._tensors[0][0]
        self._handle = kernels._library.betoken_cache_create(
            first.dtype == torch.bfloat16, first.shape[1], len(numbers), numbers.ctypes.data
        )

    def begin_step(
        self, layout: npt.NDArray[np.int32], num_rows: int, num_segments: int, has_trees: bool = False
    ) -> None:
        """Let this thread's next `attend` and `short_conv` operators run over a batch, until the next call.

        Args:
            layout: positions [R], row_segments [R], page_starts [S + 1], page_ids and, with trees, the starts [R + 1]
                and slots of `TreePaths`, one after the other; the caller keeps it alive through the step.
        """
        self._kernels._begin_step(self._handle, layout.ctypes.data, num_rows, num_segments, has_trees)

    def __del__(self) -> None:
        handle, self._handle = getattr(self, "_handle", None), None
        if handle:
            self._kernels._library.betoken_cache_destroy(handle)


_loaded: CpuKernels | None = None
_loaded_operators: dict[str, ctypes.CDLL] = {}
"""Further libraries that this process has, by name."""
_failure: str | None = None
_lock = Lock()


def load_cpu_kernels(cache_dir: Path | None = None) -> CpuKernels | None:
    """The kernels, compiled on first use; None if compilation fails, with one warning that gives the reason."""
    global _loaded, _failure
    with _lock:
        if _loaded is None and _failure is None:
            try:
                if sys.platform != "linux":
                    raise BuildError(f"the kernels are written for Linux, this is {sys.platform}")
                _loaded = CpuKernels(build(LIBRARY, cache_dir), cache_dir)
            except (BuildError, OSError) as error:
                _failure = str(error)
                _LOG.warning("the CPU kernels are not available, their slow references run instead: %s", error)
        return _loaded


def _register_shapes() -> None:
    """Register the operators' output shapes with torch's tracers."""

    def linear(x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], n)

    def linear_sums(x: Tensor, packed: Tensor, bias: Tensor | None, n: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], n, dtype=torch.float32)

    def expert_linear(x: Tensor, packed: Tensor, bias: Tensor | None, expert_ids: Tensor, n: int) -> Tensor:
        return x.new_empty(x.shape[0], n)

    def linear_grouped(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, format: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], n)

    def linear_grouped_sums(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, format: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], n, dtype=torch.float32)

    def expert_linear_grouped(
        x: Tensor, packed: Tensor, bias: Tensor | None, expert_ids: Tensor, n: int, format: int
    ) -> Tensor:
        return x.new_empty(x.shape[0], n)

    def linear_int8(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, format: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], n)

    def linear_int8_sums(x: Tensor, packed: Tensor, bias: Tensor | None, n: int, format: int) -> Tensor:
        return x.new_empty(*x.shape[:-1], n, dtype=torch.float32)

    def expert_linear_int8(
        x: Tensor, packed: Tensor, bias: Tensor | None, expert_ids: Tensor, n: int, format: int
    ) -> Tensor:
        return x.new_empty(x.shape[0], n)

    def grouped_rows(ids: Tensor, packed: Tensor, n: int, k: int, format: int) -> Tensor:
        return packed.new_empty(*ids.shape, k, dtype=torch.float32)

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layer: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        span: int,
        slopes: Tensor | None,
    ) -> Tensor:
        return query.new_empty(query.shape[0], query.shape[1], value.shape[2])

    def materialize(x: Tensor) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    products = (linear, linear_sums, expert_linear, linear_grouped, linear_grouped_sums, expert_linear_grouped)
    rounding = (linear_int8, linear_int8_sums, expert_linear_int8)
    for function in (*products, *rounding, grouped_rows, attend, materialize):
        torch.library.register_fake(f"betoken::{function.__name__}", function)


def _register_shapes_of_states() -> None:
    """Register the output shapes of operators that keep a state with torch's tracers."""

    def short_conv(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def state_conv(x: Tensor, weight: Tensor, bias: Tensor | None, layer: int) -> Tensor:
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    def recur(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        gates: Tensor,
        layer: int,
        rates: Tensor | None,
        scale: float,
        is_delta: bool,
        normalizes: bool,
        weighs: bool,
    ) -> Tensor:
        return value.new_empty(value.shape, dtype=torch.float32)

    for function in (short_conv, state_conv, recur):
        torch.library.register_fake(f"betoken::{function.__name__}", function)
