"""Runs a transformers model over flat ragged batches with paged KV. It knows no requests, sampling or scheduling.

One thread owns a runner. Row r of the logits depends on its own sequence and position only, to the last bit.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from torch import Tensor

from betoken.engine.attention import CONTEXT_KEYWORD, ProbeContext
from betoken.engine.batch import Batch, Segment, build_batch
from betoken.engine.bring_up.refusals import check_windows
from betoken.engine.bring_up.self_check import (
    check_against_eager,
    digest_of_logits,
    eager_logits,
    find_row_dependence,
    find_stock_product,
    sample_sequences,
)
from betoken.engine.bring_up.step_costs import StepCost, measure_step_costs
from betoken.engine.bring_up.warm_up import warm_up
from betoken.engine.config import EngineConfig
from betoken.engine.cpu.compiled import EXAMPLE_LOGITS, EXAMPLE_ROWS, compile_call
from betoken.engine.cpu.row_linear import BlockLinear, replace_linears
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.prepare import prepare_cuda, refusing_compiled
from betoken.engine.errors import CompiledModelRefusedError, EngineError, ModelRefusedError
from betoken.engine.forward import CpuForward, Forward, ReferenceForward
from betoken.engine.kv_pool import KvPool, LayerShape
from betoken.engine.page_table import PageTable
from betoken.engine.tree import KeptPath
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.loading import ModelInfo, load_model
from betoken.kernels import dispatch, native
from betoken.kernels.build import user_cache_dir
from betoken.kernels.cpu import CPU_DTYPES, CpuKernels, load_cpu_kernels

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Examined:
    """A model and what it says of itself before its layers are replaced."""

    model: Any
    info: ModelInfo
    shapes: dict[int, LayerShape]
    sequences: list[list[int]]
    """What the check at load runs."""
    expected: list[Tensor]
    """Their logits, none without a check."""
    is_mixture: bool

    @classmethod
    def of(cls, config: EngineConfig, model: Any, info: ModelInfo) -> "_Examined":
        shapes = _probe(model, info.max_context)
        sequences = sample_sequences(info.vocab_size, info.max_context, config.max_batch_rows)
        is_mixture = any(name.endswith("experts") for name, _ in model.named_modules())
        with _refusing(model):
            expected = eager_logits(model, sequences) if config.self_check else []
        return cls(model, info, shapes, sequences, expected, is_mixture)


_FEW_ROWS, _MANY_ROWS = (1, 2, 4, 6, 8, 16, 32), (64, 128)
"""Whose times are measured; the latter where they cost little."""


class ModelRunner:
    """A loaded model, its KV pool and its page table. Use `load`."""

    def __init__(self, info: ModelInfo, page_table: PageTable, forward: Forward, max_batch_rows: int) -> None:
        self.info = info
        self.page_table = page_table
        self.max_batch_rows = max_batch_rows
        self.is_compiled = False
        """Whether the forward runs as one compiled function."""
        self.logits_digest = ""
        """Of the logits after some fixed ids; set once the forward is what it stays."""
        self._forward = forward

    @classmethod
    def load(cls, config: EngineConfig, progress: Progress | None = None) -> "ModelRunner":
        """Load, refuse or accept, compile, check and warm up a model.

        Args:
            progress: called with what is being done and the fraction done.

        Raises:
            ModelRefusedError: the model cannot be served exactly, with the reason.
        """
        report = progress or (lambda stage, fraction: None)
        torch.set_num_threads(config.num_threads or torch.get_num_threads())
        model, info = load_model(config, report)
        return cls.from_model(config, model, info, report)

    @classmethod
    def from_model(
        cls, config: EngineConfig, model: Any, info: ModelInfo, progress: Progress | None = None
    ) -> "ModelRunner":
        """The same for a model that is loaded already, on its device, with our attention; its layers are replaced.

        Raises:
            ModelRefusedError: the model cannot be served exactly, with the reason.
        """
        report = progress or (lambda stage, fraction: None)
        examined = _Examined.of(config, model, info)
        try:
            return cls._prepared(config, examined, report)
        except CompiledModelRefusedError as error:
            if config.compile == "on":
                raise
            # Not the error itself: whoever keeps what was logged would keep the first try, and its memory.
            _LOG.warning("the model is tried eagerly, which is slower: %s", str(error))
        gc.collect()  # the first try refers to itself
        return cls._prepared(replace(config, compile="off"), examined, report)

    @classmethod
    def _prepared(cls, config: EngineConfig, examined: _Examined, report: Progress) -> "ModelRunner":
        num_threads = config.num_threads or torch.get_num_threads()
        model, sequences = examined.model, examined.sequences
        with _refusing(model):
            report("preparing the kernels", 0.2)
            if model.device.type == "cpu":
                native.load(config.cache_dir)  # sampling's, or the first request that draws would wait for a compiler
            max_context = examined.info.max_context
            forward, num_pages = _prepare(config, model, max_context, examined.shapes, num_threads, report)
            info = _within_pages(config, examined.info, num_pages, sequences)
            page_table = PageTable(num_pages, config.page_size, prefix_caching=config.prefix_caching)
            runner = cls(info, page_table, forward, config.max_batch_rows)
            dependence = None
            if config.self_check:
                report("checking against the model's own forward", 0.3)
                with refusing_compiled(isinstance(forward, CudaForward) and forward.is_compiled):
                    dependence = runner._check(config, examined)
        if config.compile != "off":
            report("compiling", 0.4)
            runner._compile(config, examined)
        if dependence is not None and not runner.is_compiled:
            raise ModelRefusedError(f"rows are not independent: {dependence}")  # compiled rows were checked afresh
        runner.logits_digest = digest_of_logits(runner)
        if dispatch.compiles_at_first_call(model.device):
            report("compiling what chooses tokens", 0.8)
            with _refusing(model):
                warm_up(runner)
        report("ready", 1.0)
        _LOG.info("model loaded: %s, %s, %d KV pages", info.model_id, info.dtype, num_pages)
        return runner

    @property
    def numerics(self) -> str:
        """Name of the arithmetic: runners of the same code with equal weights, dtype and name give equal bits."""
        how = "compiled" if self.is_compiled else "eager"
        versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
        return f"{self._forward.name}, {how}, {versions}, logits {self.logits_digest}"

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> Tensor:
        """Write the KV of the segments' tokens and return logits [sum(num_logits), V] in the model's dtype.

        Raises:
            ValueError: see `build_batch`; or a token id is outside the vocabulary, a position beyond max_context.
        """
        batch = build_batch(segments, self.page_table.page_size, self.max_batch_rows)
        self._check_range(batch)
        return self._forward(batch)

    @torch.inference_mode()
    def compact(self, paths: Sequence[KeptPath]) -> None:
        """Make chains of accepted tree paths: afterwards their KV lies as if nothing else had been drafted."""
        self._forward.pool.compact(paths)

    def measure_step_costs(
        self, rows: Sequence[int] | None = None, contexts: Sequence[int] | None = None
    ) -> list[StepCost]:
        """Median duration of a forward for each number of rows and context length; leaves the page table as it was.

        Without `rows` for up to 32, on a GPU 128; without `contexts` after 512 tokens, or as many as there is room for
        beside the most rows.
        """
        if rows is None:
            rows = (*_FEW_ROWS, *_MANY_ROWS) if isinstance(self._forward, CudaForward) else _FEW_ROWS
        if contexts is None:
            contexts = (max(0, min(512, self.info.max_context - max(rows))),)
        return measure_step_costs(self, rows, contexts)

    def _check(self, config: EngineConfig, examined: _Examined) -> str | None:
        """Raise what the model is refused for; returns how rows depend on each other where compiling may mend it."""
        sequences = examined.sequences
        check_against_eager(self, sequences, examined.expected, examined.is_mixture)
        if not config.batch_invariant:
            return None
        dependence = find_row_dependence(self, sequences)
        if isinstance(self._forward, CpuForward):
            if product := find_stock_product(self, sequences):
                raise ModelRefusedError(f"rows are not independent: {product}")
            return dependence
        if dependence is not None:
            raise ModelRefusedError(f"rows are not independent: {dependence}")
        return None

    def _compile(self, config: EngineConfig, examined: _Examined) -> None:
        """Switch to a compiled forward if that is possible and equal per row; say why where it is not."""
        forward = self._forward
        if isinstance(forward, CudaForward):  # compiled before it was recorded
            self.is_compiled = forward.is_compiled
            return
        if not isinstance(forward, CpuForward):
            if config.compile == "on":
                raise ModelRefusedError("compile=on needs the CPU kernels")
            return
        page_ids: list[int] = []
        try:
            self.page_table.extend(page_ids, EXAMPLE_ROWS)
            ids = [index % self.info.vocab_size for index in range(EXAMPLE_ROWS)]
            segment = Segment(page_ids, 0, ids, EXAMPLE_LOGITS)
            example = build_batch([segment], self.page_table.page_size, EXAMPLE_ROWS)
            forward(example)  # packs what no linear layer owns, which a tracer could not
            arguments = forward.begin(example)
            cache_dir = config.cache_dir or user_cache_dir()
            forward.model_call = compile_call(forward.traceable_call, arguments, examined.model, cache_dir)
            reason = self._find_fault(examined) if config.self_check else None
        except Exception as error:  # tracer and compiler raise many types; an eager forward is always correct
            _LOG.debug("compilation failed", exc_info=True)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.page_table.release(page_ids)
        if reason is None:
            self.is_compiled = True
            return
        forward.model_call = forward.eager_call
        if config.compile == "on":
            raise ModelRefusedError(f"the model cannot be compiled: {reason}")
        _LOG.warning("the model runs eagerly, which is slower: %s", reason)

    def _find_fault(self, examined: _Examined) -> str | None:
        try:
            check_against_eager(self, examined.sequences, examined.expected, examined.is_mixture)
        except ModelRefusedError as error:
            return str(error)
        return find_row_dependence(self, examined.sequences)

    def _check_range(self, batch: Batch) -> None:
        if min(batch.token_ids) < 0 or max(batch.token_ids) >= self.info.vocab_size:
            raise ValueError(f"segments: a token id is outside [0, {self.info.vocab_size})")
        if max(batch.positions) >= self.info.max_context:
            raise ValueError(f"segments: position {max(batch.positions)} is not below {self.info.max_context}")


@contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """Whatever the model's own code raises as a refusal that names its class."""
    try:
        yield
    except EngineError:
        raise
    except Exception as error:
        raise ModelRefusedError(f"{type(model).__name__} cannot be run: {type(error).__name__}: {error}") from error


def _kernels_for(config: EngineConfig, model: Any, pool: KvPool) -> CpuKernels | None:
    """The CPU kernels if they can run this model here."""
    if model.device.type != "cpu" or model.dtype not in CPU_DTYPES or sorted(pool.keys) != list(range(len(pool.keys))):
        return None
    return load_cpu_kernels(config.cache_dir)


@torch.inference_mode()
def _probe(model: Any, max_context: int) -> dict[int, LayerShape]:
    """Shapes of each layer's keys and values, from one forward of two tokens.

    Raises:
        ModelRefusedError: the model cannot be run this way, or hides the windows of its layers.
    """
    context = ProbeContext()
    ids = torch.zeros(1, 2, dtype=torch.int64, device=model.device)
    positions = torch.arange(2, device=model.device)[None]
    with _refusing(model):
        model(input_ids=ids, position_ids=positions, use_cache=False, **{CONTEXT_KEYWORD: context})
    if not context.shapes:
        raise ModelRefusedError(f"{type(model).__name__} has no layer that uses transformers' attention interface")
    with _refusing(model):
        check_windows(model, context.windows, max_context)
    return {layer: LayerShape(*shape) for layer, shape in context.shapes.items()}


def _within_pages(config: EngineConfig, info: ModelInfo, num_pages: int, sequences: list[list[int]]) -> ModelInfo:
    """The description with a context that `num_pages` hold.

    Raises:
        ModelRefusedError: they hold less than the check of `sequences` at load takes, or than the context asked for.
    """
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


def _prepare(
    config: EngineConfig,
    model: Any,
    max_context: int,
    shapes: dict[int, LayerShape],
    num_threads: int,
    progress: Progress,
) -> tuple[Forward, int]:
    """The device's way to run a batch, and the number of KV pages."""
    if model.device.type == "cuda" and (prepared := prepare_cuda(config, model, max_context, shapes, progress)):
        return prepared
    page_bytes = sum(shape.page_bytes(config.page_size, model.dtype.itemsize) for shape in shapes.values())
    num_pages = config.num_pages_of(page_bytes)
    # The pool has one page more than the table: padding rows write there.
    pool = KvPool(shapes, num_pages + 1, config.page_size, model.dtype, model.device)
    kernels = _kernels_for(config, model, pool)
    if kernels is None:
        if model.dtype != torch.bfloat16:
            replace_linears(model, BlockLinear)
        return ReferenceForward(model, pool, scratch_page=num_pages), num_pages
    kernels.set_num_threads(num_threads)
    return CpuForward(model, kernels, pool), num_pages
