"""The device's way to run an examined model, and the KV pages it gets.

It chooses between the CPU kernels, recorded GPU forwards and the references; it compares no logits.
"""

import logging
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from betoken.engine.bring_up.examine import Examined
from betoken.engine.bring_up.kept import KeptResult
from betoken.engine.bring_up.kernel_choice import choose_kernels
from betoken.engine.bring_up.passed_check import OtherLogitsError
from betoken.engine.config import EngineConfig
from betoken.engine.cpu.forward import CpuForward
from betoken.engine.cuda.prepare import prepare_cuda
from betoken.engine.errors import ModelRefusedError
from betoken.engine.forward import Forward
from betoken.engine.kv_pool import KvPool
from betoken.engine.model_info import ModelInfo
from betoken.engine.reference.block_linear import BlockLinear
from betoken.engine.reference.forward import ReferenceForward
from betoken.engine.state_pool import StatePool
from betoken.engine.state_table import StateTable
from betoken.engine.step import wrap_linears
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.layers import lacks_numbers, linear_paths, replace_linears
from betoken.kernels.cpu import CPU_DTYPES, CpuKernels, load_cpu_kernels

_LOG = logging.getLogger(__name__)

_EMPTY_PAGE_BYTES = 1 << 16
"""Nominal page size of a model without keys and values, whose pages only count a sequence's length."""
_PACKED_FROM, _PACKED_UNTIL = 0.2, 0.3
"""Fractions of loading between which weights are packed."""
_SPARE_STATES = 4
"""For the sequences of the check at load."""


def state_table(config: EngineConfig, examined: Examined, num_pages: int) -> StateTable | None:
    """Owners of recurrent states, for each sequence of two drafters that share a model; None for a model without."""
    if not examined.all_states:
        return None
    num_states = _SPARE_STATES + 2 * config.max_sequences
    return StateTable(num_states, _num_snapshots(config, examined, num_pages), num_waiting(config, examined))


def num_waiting(config: EngineConfig, examined: Examined) -> int:
    """Maximum number of tokens of a sequence that wait next to its state; 0 for a model without states."""
    return (config.max_uncommitted or 2 * config.max_draft_tokens + 2) if examined.all_states else 0


def snapshot_bytes(examined: Examined) -> int:
    """Bytes of one snapshot of a sequence's states."""
    return sum(shape.snapshot_bytes(examined.model.dtype.itemsize) for shape in examined.all_states.values())


def _num_snapshots(config: EngineConfig, examined: Examined, num_pages: int) -> int:
    if not config.prefix_caching:
        return 0
    return min(config.snapshot_memory_bytes // max(1, snapshot_bytes(examined)), num_pages)


def _state_pool(config: EngineConfig, examined: Examined, num_pages: int) -> StatePool | None:
    """On a CPU states take memory once they are used."""
    table = state_table(config, examined, num_pages)
    if table is None or not examined.states:
        return None
    dtype, device = examined.model.dtype, examined.model.device
    num_snapshots = table.snapshots.num_snapshots
    return StatePool(examined.states, table.num_states, table.num_waiting, dtype, device, num_snapshots)


def page_bytes(config: EngineConfig, examined: Examined) -> int:
    """Bytes of one KV page of all layers."""
    itemsize = examined.model.dtype.itemsize
    return sum(shape.page_bytes(config.page_size, itemsize) for shape in examined.shapes.values())


def prepare(config: EngineConfig, examined: Examined, progress: Progress) -> tuple[Forward, int]:
    """The forward over a new KV pool, and the number of pages that sequences may use.

    Raises:
        ModelRefusedError: the device's memory is too small, or it multiplies a row differently in other company.
        OtherLogitsError: the model has packed weights only, and the kernels that read them are not available.
        CompiledModelRefusedError: the model was to be compiled and cannot be, or not be made ready so.
    """
    model, shapes, max_context = examined.model, examined.shapes, examined.info.max_context
    if (
        model.device.type == "cuda"
        and not examined.states
        and (prepared := prepare_cuda(config, model, max_context, shapes, progress, examined.features))
    ):
        return prepared
    num_pages = config.num_pages_of(page_bytes(config, examined) or _EMPTY_PAGE_BYTES)
    if config.ranks is not None:
        num_pages = config.ranks.least(num_pages)
    # The pool has one page more than the table: padding rows write there.
    pool = KvPool(shapes, num_pages + 1, config.page_size, model.dtype, model.device)
    states = _state_pool(config, examined, num_pages)
    kernels = _kernels_for(config, model, pool)
    linears = linear_paths(model)
    forward: Forward
    if kernels is None and config.ranks is not None:
        raise ModelRefusedError("ranks: this model runs by the references here, which cannot be split")
    if kernels is None and lacks_numbers(model):
        raise OtherLogitsError("the CPU kernels cannot read the packed weights")
    if kernels is None:
        replace_linears(model, BlockLinear, only_last=model.dtype == torch.bfloat16)
        forward = ReferenceForward(model, pool, num_pages, examined.features, states)
    else:
        kernels.set_num_threads(config.num_threads or torch.get_num_threads())
        report = partial(_report_packing, progress)
        report(0.0)
        forward = CpuForward(model, kernels, pool, examined.features, states, report, examined.check.code())
        kept = KeptResult(config.cache_dir, "cpu-kernels", str(model.dtype)) if config.reuse_self_check else None
        choose_kernels(model, kernels, kept)
    wrap_linears(model, linears, config.wrap_linear, forward.step)
    if config.adds_to_embeddings:
        forward.step.add_to_embeddings(model)
    return forward, num_pages


def _report_packing(progress: Progress, fraction: float) -> None:
    progress("packing weights", _PACKED_FROM + (_PACKED_UNTIL - _PACKED_FROM) * fraction)


def within_pages(config: EngineConfig, examined: Examined, num_pages: int) -> ModelInfo:
    """The model's description with a context that `num_pages` hold.

    Raises:
        ModelRefusedError: they hold less than the check at load takes, or than the context asked for.
    """
    info, sequences = examined.info, examined.sequences
    field = "kv_memory_bytes" if config.num_pages is None else "num_pages"
    num_needed = sum(-(-len(ids) // config.page_size) for ids in sequences) if config.self_check else 1
    if num_pages < num_needed:
        raise ModelRefusedError(f"{field}: {num_pages} pages are below {num_needed}, what the check at load takes")
    num_slots = num_pages * config.page_size
    if num_slots >= info.max_context:
        return info
    if config.max_context is not None:
        raise ModelRefusedError(
            f"{field}: {num_pages} pages hold {num_slots} tokens, less than max_context = {config.max_context}"
        )
    _LOG.warning("sequences of %d tokens are served, not of the model's %d: %s", num_slots, info.max_context, field)
    return replace(info, max_context=num_slots)


def _kernels_for(config: EngineConfig, model: Any, pool: KvPool) -> CpuKernels | None:
    """The CPU kernels if they can run this model here."""
    if model.device.type != "cpu" or model.dtype not in CPU_DTYPES or sorted(pool.keys) != list(range(len(pool.keys))):
        return None
    return load_cpu_kernels(config.cache_dir)
