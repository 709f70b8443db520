"""Runs cells of the exactness matrix on real services and keeps what they gave.

Which cells there are is `matrix`'s matter, what counts as identical `identity_check`'s.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from betoken.bench.attached_weights import weight_options
from betoken.bench.baseline import PLAIN, Baseline, BaselineRun, BaselineSampling
from betoken.bench.disturber import Disturber
from betoken.bench.identity_check import Comparison, IdentityCount, Outcome, compare_ids, compare_with_transformers
from betoken.bench.identity_store import IdentityStore
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.matrix import DRAFTERS, FUSED, TOP_P, TRANSLATED, Cell, Disturbance, ServiceSet
from betoken.bench.prompts import Prompt
from betoken.bench.speculation_totals import block_efficiency
from betoken.bench.stack import Stack
from betoken.bench.streams import generate, run_bounded, sampling, speculation
from betoken.cli.local_services import LocalServicesConfig
from betoken.client import Completion
from betoken.drafters.registry import SPECS

NUM_TRIES = 5
"""Maximum number of runs of a cell with fault injection: a fast model may have answered before the fault."""


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Shared options of all cells."""

    target: str
    draft: str
    max_new_tokens: int
    few_pages: int
    """KV pages of the verify worker in the cells that force preemption."""
    compile: str
    device: str = "cpu"
    """Torch device of all models, also of `generate()`."""
    prefix_caching: bool = False
    """Whether cells find KV of the cells before them. It hides what would differ in the prompts' own rows."""
    weights: Mapping[str, str] = field(default_factory=dict)
    """Weights of attached drafters that have some, by their names."""
    dequantised: str = ""
    """Model for `generate()` instead of the target; empty for the target itself."""
    built_in: Sequence[str] = ()
    """Attached drafters whose weights the target holds."""
    draft_models: Mapping[str, str] = field(default_factory=dict)
    """Other draft models than `draft`, see `Drafting`."""
    tensor_parallel: int = 1
    """Processes that share each model."""
    overlap: str = "off"
    """Whether rounds are overlapped: the router's option."""


class MatrixRunner:
    """Starts services once per dtype and number of pages, and runs what the store lacks."""

    def __init__(
        self,
        config: RunnerConfig,
        prompts: Sequence[Prompt],
        store: IdentityStore,
        on_cell: Callable[[dict[str, Any]], None],
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._store = store
        self._on_cell = on_cell
        self._baseline: Baseline | None = None
        versions = describe_versions()
        arithmetic = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers"))
        hardware = describe_hardware()
        processors = [hardware["processor"], *(hardware.get("gpus", ()) if config.device != "cpu" else ())]
        machine = ", ".join((*processors, arithmetic))
        self._place = {"commit": versions["commit"], "machine": machine}

    async def run(self, cells: Sequence[Cell]) -> None:
        """Run the cells in order, those already done excepted."""
        missing = [cell for cell in cells if cell.name not in self._store.done]
        try:
            for services, group in groupby(missing, key=lambda cell: cell.services):
                neighbours = list(group)
                async with Stack(self._config_of(services, _hosted_for(neighbours))) as stack:
                    for cell in neighbours:
                        await self._run_with_reference(cell, stack)
        finally:
            if self._baseline is not None:
                self._baseline.close()

    def _config_of(self, services: ServiceSet, drafters: Sequence[str]) -> LocalServicesConfig:
        config, attached = self._config, services.attached
        on_device, on_ranks = ("--device", config.device), ("--tensor-parallel", str(config.tensor_parallel))
        has_draft_model = any(SPECS[name].runs_model for name in drafters)
        few_pages = ("--num-pages", str(config.few_pages)) if services.has_few_pages else ()
        sources = ("ngram", *config.weights, *config.built_in) if attached == FUSED else ()
        names = (attached, *sources) if attached else ()
        translation = ("--target-tokenizer", config.target) if services.model == TRANSLATED else ()
        return LocalServicesConfig(
            target=config.target,
            draft=config.draft_models.get(services.model, config.draft),
            drafters=() if attached else drafters,
            attached_drafters=names,
            num_verify_workers=1 + services.has_spare,
            num_attaching=1,
            dtype=services.dtype,
            compile=config.compile,
            prefix_caching=config.prefix_caching,
            # Half a GPU for the others.
            verify_options=(
                *on_device,
                *on_ranks,
                "--kv-memory-fraction",
                "0.5",
                *few_pages,
                *weight_options(names, config.weights),
            ),
            draft_options=(*on_device, *(on_ranks if has_draft_model else ()), *translation),
            router_options=("--overlap", config.overlap),
        )

    async def _run_with_reference(self, cell: Cell, stack: Stack) -> None:
        for needed in dict.fromkeys((cell.reference, cell)):
            if needed.name not in self._store.done:
                record = await self._run_cell(needed, stack)
                self._store.append(record)
                self._on_cell(record)

    async def _run_cell(self, cell: Cell, stack: Stack) -> dict[str, Any]:
        """Run all prompts; repeat if a fault was to be injected and every answer had ended before."""
        start = time.monotonic()
        num_preemptions_before = await stack.num_preemptions()
        count, num_strikes = IdentityCount(), 0
        for _ in range(NUM_TRIES if cell.harms_worker else 1):
            completions, strikes = await self._answers(cell, stack)
            num_strikes += strikes
            await self._count(cell, completions, count, stack)
            num_preemptions = await stack.num_preemptions() - num_preemptions_before
            is_disturbed = _is_disturbed(cell, completions, num_strikes, num_preemptions)
            if is_disturbed:
                break
        are_pages_free = await stack.all_pages_free()
        return {
            "cell": cell.name,
            "compared": count.compared,
            "identical": count.identical,
            "near_ties": count.near_ties,
            "failed": count.failed,
            "passed": count.holds and are_pages_free and is_disturbed,
            "is_disturbed": is_disturbed,
            "against": cell.against,
            **self._place,
            "differences": count.differences,
            "are_pages_free": are_pages_free,
            "num_strikes": num_strikes,
            "num_preemptions": num_preemptions,
            "num_failed_drafts": sum(completion.speculation.num_failed_drafts for completion in completions),
            "block_efficiency": block_efficiency([completion.speculation for completion in completions]),
            "seconds": round(time.monotonic() - start, 1),
        }

    async def _count(self, cell: Cell, completions: list[Completion], count: IdentityCount, stack: Stack) -> None:
        """Compare the answers with the cell's reference, which may be this cell."""
        if cell.is_reference:
            self._store.save_reference(cell.name, [completion.output_ids for completion in completions])
        reference = self._store.reference(cell.reference.name)
        if cell.against:  # a reference equals itself, which says nothing
            for prompt, completion, ids in zip(self._prompts, completions, reference, strict=True):
                comparison = await self._compare(cell, prompt, completion, ids, stack)
                count.add(comparison, with_transformers=cell.meets_transformers)

    async def _answers(self, cell: Cell, stack: Stack) -> tuple[list[Completion], int]:
        """Run all prompts once; return the number of injected faults."""
        max_new_tokens = self._config.max_new_tokens
        expected_tokens = len(self._prompts) * max_new_tokens

        async with AsyncExitStack() as exits:
            disturber = Disturber(expected_tokens, *_harm(cell, stack))
            if cell.harms_worker:
                await exits.enter_async_context(_running(disturber))

            async def answer(prompt: Prompt) -> Completion:
                timed = await generate(
                    stack.client,
                    prompt.text,
                    sampling(max_new_tokens, cell.temperature, TOP_P, seed=prompt.index),
                    speculation(
                        cell.drafting.drafter, cell.num_draft_tokens or None, settings=dict(cell.drafting.settings)
                    ),
                    disturber.streamed,
                )
                return timed.completion

            return await run_bounded(self._prompts, answer, cell.concurrency), disturber.num_strikes

    async def _compare(
        self, cell: Cell, prompt: Prompt, completion: Completion, reference_ids: tuple[int, ...], stack: Stack
    ) -> Comparison:
        own = compare_ids(prompt, completion.output_ids, reference_ids)
        if own.outcome is not Outcome.IDENTICAL or not cell.meets_transformers:
            return own
        run = await asyncio.to_thread(self._transformers_run, prompt)
        return await compare_with_transformers(prompt, completion, run, stack.client, self._float32_baseline())

    def _transformers_run(self, prompt: Prompt) -> BaselineRun:
        """Greedy float32 `generate()`, each prompt once per store."""
        if self._store.transformers(prompt.index) is None:
            run = self._float32_baseline().generate(PLAIN, prompt.text, self._config.max_new_tokens)
            self._store.save_transformers(prompt.index, run.prompt_ids, run.ids)
        kept = self._store.transformers(prompt.index)
        assert kept is not None
        return BaselineRun(*kept, seconds=0.0)

    def _float32_baseline(self) -> Baseline:
        if self._baseline is None:
            config = self._config
            target = config.dequantised or config.target
            self._baseline = Baseline(target, None, "float32", BaselineSampling(), config.device, is_timed=False)
        return self._baseline


def _hosted_for(cells: Sequence[Cell]) -> list[str]:
    """The cells' drafters, and always the sources of `fused`."""
    wanted = {"model", "ngram"} | {cell.drafting.drafter for cell in cells}
    return [name for name in DRAFTERS if name in wanted]


def _is_disturbed(cell: Cell, completions: list[Completion], num_strikes: int, num_preemptions: int) -> bool:
    """Whether the cell's fault hit any answer; True for cells without faults."""
    return {
        Disturbance.NONE: True,
        Disturbance.PREEMPTION: num_preemptions > 0,
        Disturbance.DRAFT_KILLED: num_strikes > 0,
        Disturbance.DRAFT_HUNG: num_strikes > 0,
        Disturbance.VERIFY_KILLED: any(completion.speculation.num_failovers for completion in completions),
    }[cell.disturbance]


def _harm(cell: Cell, stack: Stack) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Injection of the cell's fault into a worker, and its recovery."""
    if cell.disturbance is Disturbance.VERIFY_KILLED:
        return stack.kill_first_verify_worker, stack.restart_first_verify_worker
    if cell.disturbance is Disturbance.DRAFT_HUNG:
        return stack.pause_draft_worker, stack.resume_draft_worker
    return stack.kill_draft_worker, stack.restart_draft_worker


@asynccontextmanager
async def _running(disturber: Disturber) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(disturber.run())
        try:
            yield
        finally:
            disturber.finish()
