"""From a checkpoint to a runner that serves: load, examine, prepare, check, compile, warm up.

A model that cannot be served exactly is refused with the reason. It knows no workers.
"""

import gc
import logging
from dataclasses import replace
from typing import Any

import torch

from betoken.engine.bring_up.examine import Examined, examine, refusing
from betoken.engine.bring_up.packed_file import find_packed, keep_packed
from betoken.engine.bring_up.passed_check import OtherLogitsError
from betoken.engine.bring_up.prepare import num_waiting, page_bytes, prepare, snapshot_bytes, state_table, within_pages
from betoken.engine.bring_up.self_check import (
    check_against_eager,
    distances,
    find_row_dependence,
    find_stock_product,
)
from betoken.engine.bring_up.warm_up import warm_up
from betoken.engine.config import EngineConfig
from betoken.engine.cpu.rounding_check import check_rounding_layers
from betoken.engine.cuda.prepare import refusing_compiled
from betoken.engine.errors import CompiledModelRefusedError, ModelRefusedError
from betoken.engine.model_info import ModelInfo
from betoken.engine.page_table import PageTable
from betoken.engine.ranks.commands import Command, pack
from betoken.engine.ranks.leading import LeadingForward, agree, exact_rows_of_all
from betoken.engine.ranks.loading import load_part
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.activations import select_activations
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.memory import large_buffers_returned
from betoken.kernels import dispatch, native
from betoken.kernels.code_folder import user_cache_dir

_LOG = logging.getLogger(__name__)


def load_runner(config: EngineConfig, progress: Progress | None = None) -> ModelRunner:
    """Load a model and make it ready to serve.

    Args:
        progress: called with what is being done and the fraction done.

    Raises:
        ModelRefusedError: the model cannot be served exactly, with the reason.
    """
    with large_buffers_returned():
        return _load(config, progress or _unheard)


def _load(config: EngineConfig, report: Progress) -> ModelRunner:
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    try:
        return runner_of(config, *load_part(config, report, find_packed(config)), report)
    except OtherLogitsError as error:
        _LOG.warning("the check at load is repeated: %s", str(error))  # the text only: see `runner_of`
    if config.ranks is not None:
        config.ranks.send(pack(Command.RELOAD))
    gc.collect()
    return runner_of(config, *load_part(config, report), report)


def runner_of(config: EngineConfig, model: Any, info: ModelInfo, progress: Progress | None = None) -> ModelRunner:
    """Make a loaded model ready to serve. It is on its device, with our attention; its layers are replaced.

    Raises:
        ModelRefusedError: the model cannot be served exactly, with the reason.
        OtherLogitsError: a check that passed before has to be repeated, with the model loaded anew.
    """
    report = progress or _unheard
    select_activations(config, model)
    examined = examine(config, model, info, report)
    try:
        return _ready(config, examined, report)
    except CompiledModelRefusedError as error:
        if config.compile == "on" or config.ranks is not None:
            raise
        # The text only: a log handler that kept the error would keep the first try and its memory.
        _LOG.warning("the model is tried eagerly, which is slower: %s", str(error))
    gc.collect()  # the first try refers to itself
    return _ready(replace(config, compile="off"), examined, report)


def _ready(config: EngineConfig, examined: Examined, report: Progress) -> ModelRunner:
    model = examined.model
    dependence = None
    with refusing(model):
        report("preparing the kernels", 0.2)
        if model.device.type == "cpu":
            native.load(config.cache_dir)  # sampling's, or the first request that draws would wait for a compiler
        forward, num_pages = prepare(config, examined, report)
        num_stages, leading = 1, None
        if config.ranks is not None:
            agree(config.ranks, examined.info, forward)
            forward = leading = LeadingForward(forward, config.ranks, examined.info.vocab_size)
            num_stages = config.ranks.num_stages
        info = within_pages(config, examined, num_pages)
        states = state_table(config, examined, num_pages)
        # A page says what a sequence's keys are, not what its states have seen.
        caches = config.prefix_caching and (states is None or states.snapshots.num_snapshots > 0)
        page_table = PageTable(num_pages, config.page_size, prefix_caching=caches, states=states)
        runner = ModelRunner(
            info,
            page_table,
            forward,
            config.max_num_batched_tokens,
            examined.features.layers,
            num_waiting(config, examined),
            leading if num_stages > 1 else None,
            num_stages,
        )
        if config.self_check:
            report("checking against the model's own forward", 0.3)
            with refusing_compiled(runner.is_compiled):
                dependence = _check(config, runner, examined)
    if config.compile != "off":
        report("compiling", 0.4)
        _compile(config, runner, examined)
    if dependence is not None and not runner.is_compiled:
        raise ModelRefusedError(f"rows are not independent: {dependence}")  # compiled rows were checked afresh
    runner.logits_digest = examined.check.logits_digest(runner)
    if dependence is None and (runner.is_compiled or config.compile == "off" or not runner.can_compile):
        examined.check.keep()  # a model that could not be compiled is tried again
        keep_packed(config, model, info.weights_fingerprint)
    runner.weight_bytes, runner.state_bytes = weight_bytes(model), forward.state_bytes
    runner.snapshot_bytes = snapshot_bytes(examined)
    runner.kv_bytes = num_pages * page_bytes(config, examined)
    if dispatch.compiles_at_first_call(model.device):
        report("compiling what chooses tokens", 0.8)
        with refusing(model):
            warm_up(runner)
    _LOG.info("model loaded: %s, %s, %d KV pages", info.model_id, info.dtype, num_pages)
    return runner


def weight_bytes(model: Any) -> int:
    """Bytes of a model's parameters and buffers, each memory once: tied ones share theirs."""
    sizes = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type != "meta"
    }
    return sum(sizes.values())


def _check(config: EngineConfig, runner: ModelRunner, examined: Examined) -> str | None:
    """Raise the reason of a refusal; return how rows depend on each other if compiling may fix it."""
    if examined.check.is_known:
        if runner.is_compiled or not runner.can_compile or config.compile == "off":  # else once it is compiled
            examined.check.compare(runner, examined.sequences)
        return None
    with exact_rows_of_all(examined.model, config.ranks):
        check_against_eager(runner, examined.sequences, examined.expected, examined.is_mixture)
    if examined.rounds_rows:
        check_rounding_layers(examined.model)
        examined.rounding[:] = distances(runner, examined.sequences, examined.expected)
    dependence = find_row_dependence(runner, examined.sequences) if config.batch_invariant else None
    if config.batch_invariant and runner.can_compile:
        if product := find_stock_product(runner, examined.sequences):
            raise ModelRefusedError(f"rows are not independent: {product}")
    elif dependence is not None:
        raise ModelRefusedError(f"rows are not independent: {dependence}")
    examined.check.passed(runner, examined.sequences)
    return dependence


def _compile(config: EngineConfig, runner: ModelRunner, examined: Examined) -> None:
    """Switch to a compiled forward if that is possible and equal per row; else log the reason."""
    if runner.is_compiled:
        return
    if not runner.can_compile:
        if config.compile == "on":
            raise ModelRefusedError("compile=on needs the CPU kernels")
        return
    try:
        runner.compile(config.cache_dir or user_cache_dir())
        reason = _find_fault(runner, examined) if config.self_check else None
    except OtherLogitsError:
        raise
    except Exception as error:  # tracer and compiler raise many types; an eager forward is always correct
        _LOG.debug("compilation failed", exc_info=True)
        reason = f"{type(error).__name__}: {error}"
    if reason is None:
        return
    runner.run_eagerly()
    if config.compile == "on":
        raise ModelRefusedError(f"the model cannot be compiled: {reason}")
    _LOG.warning("the model runs eagerly, which is slower: %s", reason)
    if config.self_check and examined.check.is_known:
        examined.check.compare(runner, examined.sequences)


def _find_fault(runner: ModelRunner, examined: Examined) -> str | None:
    if examined.check.is_known:
        examined.check.compare(runner, examined.sequences)
        return None
    try:
        check_against_eager(runner, examined.sequences, examined.expected, examined.is_mixture, examined.rounding)
    except ModelRefusedError as error:
        return str(error)
    if (dependence := find_row_dependence(runner, examined.sequences)) is None:
        examined.check.passed(runner, examined.sequences)
    return dependence


def _unheard(stage: str, fraction: float) -> None:
    """Progress without a receiver."""
