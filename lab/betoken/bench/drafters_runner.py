"""Measures drafters prompt by prompt on running services, interleaved with `transformers`, and stores each result.

Every side runs once on a prompt, one at a time, in an order drawn per prompt. Disturbances of the machine so fall on
all sides alike.
"""

import asyncio
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from betoken.bench.baseline import ASSISTED, BASELINE_NAMES, PLAIN, Baseline, BaselineRun
from betoken.bench.drafters_options import DraftersOptions
from betoken.bench.drafters_store import DraftersStore, LeftOut, PromptRun, SideRun, Task
from betoken.bench.identity_check import Comparison, IdentityCount, compare_equal, compare_with_transformers
from betoken.bench.machine import describe_hardware, describe_versions
from betoken.bench.prompts import Prompt
from betoken.bench.sides import HOSTED, PLAIN_DECODING, Side, Variant
from betoken.bench.stack import Stack
from betoken.bench.streams import generate, sampling
from betoken.cli.report import TimedCompletion
from betoken.client import Completion

TRIAL_TOKENS = 48
NUM_WARM_UPS = 2
SEED_STEP = 1_000_003
"""Distance between the seeds of two samples of a prompt."""
METHODS = {name: method for method, name in BASELINE_NAMES.items()}
MT_BENCH = frozenset(
    {"writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"},
)
"""MT-Bench's eight categories, which Spec-Bench's own evaluation counts as one, `mt_bench`."""


@dataclass(slots=True)
class DraftersRunner:
    """Runs what the store lacks."""

    options: DraftersOptions
    stacks: Mapping[Variant, Stack]
    """Running services by what their drafters run on; all but the one under way are idle."""
    baseline: Baseline | None
    store: DraftersStore
    _versions: dict[str, str] = field(default_factory=describe_versions)

    async def run(self, prompts: dict[str, list[Prompt]]) -> None:
        """Measure the prompts of each file, by name, in `options.repeats` passes per sample.

        Raises:
            ValueError: no prompt fits the context with its answer.
        """
        selected = await self._select(prompts)
        if not selected:
            raise ValueError(f"no prompt fits the context with --max-new-tokens {self.options.max_new_tokens}")
        tasks = [
            (Task(name, prompt.index, repeat), prompt)
            for repeat in range(self.options.repeats * self.options.samples)
            for name, prompt in interleave(selected)
        ]
        missing = [(task, prompt) for task, prompt in tasks if task not in self.store.done]
        print(f"{len(tasks)} prompts, {len(tasks) - len(missing)} measured already", file=sys.stderr)
        if not missing:
            return
        self.store.begin_session(describe_hardware(), self._versions)
        await self._warm_up([prompt for _, prompt in missing[:NUM_WARM_UPS]])
        start = time.monotonic()
        for number, (task, prompt) in enumerate(missing, start=1):
            self.store.append(await self._measure(task, prompt))
            minutes = (time.monotonic() - start) / 60
            left = minutes / number * (len(missing) - number)
            print(f"{number} of {len(missing)}, {minutes:.1f} min, about {left:.0f} more", file=sys.stderr)
            if self.options.minutes is not None and minutes >= self.options.minutes:
                return

    async def _select(self, prompts: dict[str, list[Prompt]]) -> dict[tuple[str, str], list[Prompt]]:
        """The first `options.limit` prompts that fit the context, by file name and category."""
        selected: dict[tuple[str, str], list[Prompt]] = {}
        left_out: list[LeftOut] = []
        for name, of_file in prompts.items():
            groups: dict[tuple[str, str], list[Prompt]] = {}
            for prompt in of_file:
                groups.setdefault((name, category_of(prompt, self.options.category)), []).append(prompt)
            for group, members in groups.items():
                fitting = await self.stacks[HOSTED].fitting(members, self.options.max_new_tokens, file=sys.stderr)
                if fitting:
                    selected[group] = fitting[: self.options.limit]
                left_out.append(LeftOut(*group, len(members) - len(fitting)))
        self.store.save_left_out(left_out)
        return selected

    async def _warm_up(self, prompts: Sequence[Prompt]) -> None:
        """Every side once per prompt, untimed; the first time also the best number of threads for `transformers`."""
        if self.baseline is not None:
            if not self.store.num_threads:
                methods = [method for method in BASELINE_NAMES if method != ASSISTED or self.options.draft]
                choose = self.baseline.choose_num_threads
                self.store.save_num_threads(await asyncio.to_thread(choose, methods, prompts[0].text, TRIAL_TOKENS))
            self.baseline.num_threads = self.store.num_threads
        for prompt in prompts:
            for side in (PLAIN_DECODING, *self.options.drafters):
                await self._ours(side, prompt, prompt.index, tenant="warm-up")
            for method in self._methods():
                await self._theirs(method, prompt, prompt.index)

    async def _measure(self, task: Task, prompt: Prompt) -> PromptRun:
        ours: dict[str, TimedCompletion] = {}
        theirs: dict[str, BaselineRun] = {}
        runs: dict[str, SideRun] = {}
        sides = {side.name: side for side in (PLAIN_DECODING, *self.options.drafters)}
        load_average = os.getloadavg()[0]
        seed = seed_of(task, self.options.samples)
        for name in shuffled([*sides, *map(BASELINE_NAMES.__getitem__, self._methods())], task):
            if name in sides:
                answer = ours[name] = await self._ours(sides[name], prompt, seed, tenant=name[:128])
                stats = answer.completion.speculation if name != PLAIN_DECODING.name else None
                runs[name] = SideRun(len(answer.completion.output_ids), answer.seconds, stats)
            else:
                run = theirs[name] = await self._theirs(METHODS[name], prompt, seed)
                runs[name] = SideRun(len(run.ids), run.seconds)
        identity = await self._compare(prompt, {name: answer.completion for name, answer in ours.items()}, theirs)
        category = category_of(prompt, self.options.category)
        return PromptRun(task, category, runs, identity, self._versions["commit"], round(load_average, 2))

    async def _ours(self, side: Side, prompt: Prompt, seed: int, tenant: str) -> TimedCompletion:
        """One answer of a side. Sides are different tenants, so that no memory across requests serves two of them."""
        options = self.options
        return await generate(
            self.stacks[side.variant].client,
            prompt.text,
            sampling(options.max_new_tokens, options.temperature, seed=seed, ignore_eos=True),
            side.speculation(options.num_draft_tokens),
            tenant=tenant,
        )

    async def _theirs(self, method: str, prompt: Prompt, seed: int) -> BaselineRun:
        assert self.baseline is not None
        generate = self.baseline.generate
        return await asyncio.to_thread(generate, method, prompt.text, self.options.max_new_tokens, seed=seed)

    def _methods(self) -> list[str]:
        return list(self.baseline.num_threads) if self.baseline is not None else []

    async def _compare(
        self, prompt: Prompt, ours: dict[str, Completion], theirs: dict[str, BaselineRun]
    ) -> IdentityCount:
        """Compare every drafter with decoding without drafts, and the latter with `generate()` if they must agree."""
        count = IdentityCount()
        plain = ours[PLAIN_DECODING.name]
        for name, completion in ours.items():
            if name != PLAIN_DECODING.name:
                comparison = compare_equal(prompt, completion, plain)
                detail = f"{name}: {comparison.detail}" if comparison.detail else ""
                count.add(Comparison(comparison.outcome, detail))
        if self.baseline is not None and self.options.is_comparable_with_transformers:
            run, client = theirs[BASELINE_NAMES[PLAIN]], self.stacks[HOSTED].client
            verdict = await compare_with_transformers(prompt, plain, run, client, self.baseline, ignore_eos=True)
            count.add(verdict, with_transformers=True)
        return count


def category_of(prompt: Prompt, absent: str) -> str:
    """The group a prompt is reported in; `absent` where its file names no category."""
    if prompt.category in MT_BENCH:
        return "mt_bench"
    return prompt.category or absent


def seed_of(task: Task, num_samples: int) -> int:
    """Seed of a pass over a prompt; passes of the same sample repeat it."""
    return task.index + SEED_STEP * (task.repeat % num_samples)


def shuffled(names: Sequence[str], task: Task) -> list[str]:
    """The sides' order on one prompt; the same whenever it is asked for."""
    order = list(names)
    random.Random(f"{task.prompts} {task.index} {task.repeat}").shuffle(order)
    return order


def interleave(groups: dict[tuple[str, str], list[Prompt]]) -> Iterator[tuple[str, Prompt]]:
    """File name and prompt, one of each group in turn, so that whatever was measured first is of all kinds."""
    named = [[(name, prompt) for prompt in prompts] for (name, _), prompts in groups.items()]
    return (entry for entry in chain.from_iterable(zip_longest(*named)) if entry is not None)
