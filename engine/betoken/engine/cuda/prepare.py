"""Makes a loaded model ready on a GPU: linear layers, memory measured, KV pool, graphs. It asks the device once."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from betoken.engine.config import EngineConfig
from betoken.engine.cuda.buckets import bucket_sizes
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.graphs import GraphRecorder
from betoken.engine.cuda.memory import count_pages, measure_forward
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_linear import RowLinear, find_row_dependence, order_as_whole, replace_grouped
from betoken.engine.errors import CompiledModelRefusedError, ModelRefusedError
from betoken.engine.features import NO_FEATURES, Features
from betoken.engine.kv_pool import KvPool, LayerShape
from betoken.engine.step import wrap_linears
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.layers import linear_paths, replace_linears
from betoken.kernels.code_folder import private_folder, user_cache_dir

_LOG = logging.getLogger(__name__)

_START, _END = 0.2, 0.3
"""Start and end of this stage of loading, as fractions."""


def prepare_cuda(
    config: EngineConfig,
    model: Any,
    max_context: int,
    shapes: dict[int, LayerShape],
    progress: Progress,
    features: Features = NO_FEATURES,
) -> tuple[CudaForward, int] | None:
    """The forward and the number of KV pages; None if the model uses operators that may depend on the number of rows.

    The calling thread is then the one that uses the device.

    Raises:
        ModelRefusedError: the device's memory is too small, or it multiplies a row differently in other company.
        CompiledModelRefusedError: the model was to be compiled and cannot be, or not be made ready so.
    """
    torch.cuda.set_device(model.device)
    linears = linear_paths(model)
    _keep_kernels(config)
    replace_grouped(model)
    if config.batch_invariant:
        replace_linears(model, RowLinear)
        order_as_whole(model)
        use_row_experts(model)
        if reason := find_row_dependence(model):
            raise ModelRefusedError(
                f"{reason} on this device: set batch_invariant to false to serve without the promise"
            )
    else:
        replace_linears(model, RowLinear, only_last=True)  # cuBLAS would round its sums
    try:
        progress("measuring memory", _START)
        scratch = KvPool(shapes, 1, config.page_size, model.dtype, model.device)
        name = _name(config, model.device)
        forward = CudaForward(model, scratch, max_context, name, config.batch_invariant, features)
        wrap_linears(model, linears, config.wrap_linear, forward.step)
        if config.adds_to_embeddings:
            forward.step.add_to_embeddings(model)
        try:
            use = measure_forward(lambda: _run_every_size(config, forward), model.device)
        except ModelRefusedError as error:
            _LOG.warning("%s: the reference path runs instead, which is slow", error)
            return None
        page_bytes = sum(shape.page_bytes(config.page_size, model.dtype.itemsize) for shape in shapes.values())
        if config.num_pages is None and config.kv_memory_bytes is None:
            left = replace(use, free_bytes=use.free_bytes - config.beside_bytes)
            num_bytes = page_bytes + config.beside_page_bytes
            num_pages = count_pages(left, config.kv_memory_fraction, num_bytes, config.page_size, max_context)
        else:
            num_pages = config.num_pages_of(page_bytes)
        if config.ranks is not None:
            num_pages = config.ranks.least(num_pages)
        with refusing_compiled(config.compile != "off"):
            if config.compile != "off":
                _compile(config, forward, progress)
            forward.use_pool(KvPool(shapes, num_pages + 1, config.page_size, model.dtype, model.device))
            _record(config, forward, progress)
    except torch.OutOfMemoryError as error:
        raise ModelRefusedError(f"the device's memory is too small: {error}") from error
    return forward, num_pages


@contextmanager
def refusing_compiled(is_compiled: bool) -> Iterator[None]:
    """Convert errors within the block to the refusal of a compiled model, if they are one."""
    try:
        yield
    except Exception as error:
        if not is_compiled:
            raise
        reason = str(error) if isinstance(error, ModelRefusedError) else f"{type(error).__name__}: {error}"
        raise CompiledModelRefusedError(reason) from error


def _run_every_size(config: EngineConfig, forward: CudaForward) -> None:
    """The largest forward, its halves, and those to be recorded. Attention of few rows divides its keys, which takes
    memory. Tiles are twice as high for twice as many rows, and each height compiles a separate kernel."""
    recorded = _recorded_sizes(config)
    num_rows = config.max_num_batched_tokens
    while num_rows > max(recorded, default=0):
        forward.run_padding(num_rows)
        num_rows //= 2
    for num_rows in recorded:
        forward.run_padding(num_rows)


def _recorded_sizes(config: EngineConfig) -> list[int]:
    """Numbers of rows of the forwards that are recorded; none on a pipeline stage, which waits for others within."""
    if config.ranks is not None and config.ranks.num_stages > 1:
        return []
    return bucket_sizes(min(config.max_graph_rows, config.max_num_batched_tokens))


def _keep_kernels(config: EngineConfig) -> None:
    """Triton keeps compiled code in the worker's cache folder, which only the environment can set."""
    if "TRITON_CACHE_DIR" not in os.environ:
        os.environ["TRITON_CACHE_DIR"] = str(private_folder(config.cache_dir or user_cache_dir()) / "triton")


def _compile(config: EngineConfig, forward: CudaForward, progress: Progress) -> None:
    progress("compiling", _START)
    try:
        forward.compile(config.cache_dir or user_cache_dir())
    except Exception as error:  # tracer and compiler raise many types
        raise ModelRefusedError(f"the model cannot be compiled: {type(error).__name__}: {error}") from error
    torch.cuda.empty_cache()  # weights that were joined: while a graph is recorded, none would be given back


def _record(config: EngineConfig, forward: CudaForward, progress: Progress) -> None:
    """Record graphs, or say why forwards stay eager."""
    sizes = _recorded_sizes(config)
    if not sizes:
        _LOG.info("forwards are not recorded as graphs: pipeline stages, or max_graph_rows = 0")
        return

    def report(fraction: float) -> None:
        progress("recording graphs", _START + (_END - _START) * fraction)

    try:
        forward.record(sizes, GraphRecorder(), report)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # CUDA's own complaint about what cannot be recorded
        _LOG.warning("forwards are not recorded as graphs, which is slower: %s", error)


def _name(config: EngineConfig, device: torch.device) -> str:
    import triton  # what compiles the kernels: part of what their bits depend on

    products = "row-invariant kernels" if config.batch_invariant else "cublas products: rows depend on the batch"
    return f"cuda {torch.cuda.get_device_name(device)}, {products}, triton {triton.__version__}"
