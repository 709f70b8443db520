"""`betoken plan`: expected speed-up and best draft length of a deployment, from its step times and acceptance.

Runs no service; `common.economy` has the formulas.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, cast

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from betoken.cli.connection import reported_errors
from betoken.common.economy.column_split import GATHERS_PER_LAYER, ColumnSplit
from betoken.common.economy.model_shape import read_shape
from betoken.common.economy.pipeline import PipelineStages
from betoken.common.economy.plan import DraftKind, Plan, PlanInputs, PlannedMode, PlannedRound, plan
from betoken.common.errors import InvalidArgumentError


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The values of the options."""

    target_step_ms: Annotated[float, typer.Option(help="Decode step of the target with --batch sequences, ms.")]
    draft_step_ms: Annotated[float, typer.Option(help="Forward of the drafter, ms.")]
    acceptance: Annotated[float, typer.Option(help="Acceptance probability of a draft token, 0 to 1.")]
    batch: Annotated[int, typer.Option(help="Sequences per forward.")] = 1
    rtt_ms: Annotated[float, typer.Option(help="Round trip from the router to either worker, ms.")] = 0.0
    hit_rate: Annotated[float, typer.Option(help="Share of overlapped rounds whose outcome was drafted, 0 to 1.")] = 0.8
    token_ms: Annotated[float, typer.Option(help="Time that one more token adds to a verify forward, ms.")] = 0.0
    experts: Annotated[int | None, typer.Option(help="Experts per layer of a mixture-of-experts target.")] = None
    active: Annotated[int | None, typer.Option(help="Experts that a token selects.")] = None
    draft: Annotated[DraftKind, typer.Option(help="Forwards of the drafter: one per token, or one per round.")] = (
        DraftKind.SEQUENTIAL
    )
    max_draft_tokens: Annotated[int, typer.Option(help="Longest draft to consider.")] = 16
    devices: Annotated[int, typer.Option(help="Devices among which the target's layers are split.")] = 1
    link_gb_s: Annotated[float | None, typer.Option(help="Bandwidth into a device, GB/s; with --devices.")] = None
    gather_us: Annotated[float, typer.Option(help="Time of a gather of a few bytes, microseconds.")] = 20.0
    pipeline: Annotated[int, typer.Option(help="Stages of --devices each that divide the target's layers.")] = 1
    micro_batches: Annotated[
        int | None, typer.Option(help="Forwards that stages have under way; default: --pipeline, at most --batch.")
    ] = None
    stage_link_gb_s: Annotated[
        float | None, typer.Option(help="Bandwidth from one stage to the next, GB/s; with --pipeline.")
    ] = None
    stage_link_us: Annotated[float, typer.Option(help="Time of a few bytes between stages, microseconds.")] = 100.0
    model: Annotated[
        str | None, typer.Option(help="Target: a directory or a GGUF file; with --devices or --pipeline.")
    ] = None
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False


def print_plan(options: PlanOptions) -> None:
    """Predict the speed-up of speculative decoding, the best draft length, and the costs at which it is slower."""
    with reported_errors(None, options.json_):
        values = {field.name: getattr(options, field.name) for field in fields(PlanInputs)}
        planned = plan(PlanInputs(**values))
        split, stages = column_split(options), pipeline_stages(options)
        if options.json_:
            found = {"column_split": split and split_json(split), "pipeline": stages and stages_json(stages)}
            print(json.dumps(as_json(planned) | {name: value for name, value in found.items() if value is not None}))
            return
        console = Console()
        grid = summary(planned)
        if split is not None:
            add_split(grid, split)
        if stages is not None:
            add_stages(grid, stages, options)
        console.print(grid)
        console.print()
        console.print(table(planned))


def column_split(options: PlanOptions) -> ColumnSplit | None:
    """The split among `--devices`; None for one device. With stages it is the one of a micro-batch.

    Raises:
        InvalidArgumentError: an option is missing or outside its range.
    """
    if not _has_options(options, "devices", "link_gb_s"):
        return None
    shape, link_gb_s = read_shape(cast(str, options.model)), cast(float, options.link_gb_s)
    step_ms, num_sequences = _micro_batch(options)
    return ColumnSplit(shape, options.devices, link_gb_s, options.gather_us, step_ms, num_sequences)


def pipeline_stages(options: PlanOptions) -> PipelineStages | None:
    """The `--pipeline` stages; None for one stage.

    Raises:
        InvalidArgumentError: an option is missing or outside its range.
    """
    if not _has_options(options, "pipeline", "stage_link_gb_s"):
        return None
    split = column_split(options)
    return PipelineStages(
        read_shape(cast(str, options.model)),
        options.pipeline,
        _num_micro_batches(options),
        cast(float, options.stage_link_gb_s),
        options.stage_link_us,
        _micro_batch(options)[0] if split is None else split.step_ms,
        options.batch,
    )


def _has_options(options: PlanOptions, name: str, link: str) -> bool:
    """Whether the model is divided by this option, which the others depend on."""
    option = f"--{name}"
    if getattr(options, name) == 1:
        others = [link, *(("micro_batches",) if name == "pipeline" else ())]
        others += ["model"] if options.devices == options.pipeline == 1 else []
        for other in others:
            if (value := getattr(options, other)) is not None:
                raise InvalidArgumentError(other, value, f"must be given with {option} of at least 2")
        return False
    for other in (link, "model"):
        if getattr(options, other) is None:
            raise InvalidArgumentError(other, "absent", f"must be given with {option}")
    return True


def _num_micro_batches(options: PlanOptions) -> int:
    given = options.micro_batches
    return max(1, min(options.pipeline, options.batch)) if given is None else given


def _micro_batch(options: PlanOptions) -> tuple[float, int]:
    """Decode step of one device with the sequences of a micro-batch, milliseconds, and their number."""
    num_sequences = -(-options.batch // max(1, _num_micro_batches(options)))
    step_ms = options.target_step_ms - options.token_ms * (options.batch - num_sequences)
    if step_ms <= 0:
        limit = f"must be below {options.target_step_ms / (options.batch - num_sequences):g} with --pipeline"
        raise InvalidArgumentError("token_ms", options.token_ms, limit)
    return step_ms, num_sequences


def stages_json(stages: PipelineStages) -> dict[str, Any]:
    """The stages and their cost, of JSON types only."""
    costs = ("state_bytes", "link_ms", "stage_ms", "pass_ms", "step_ms", "idle_share", "bubble_share")
    return asdict(stages) | {name: getattr(stages, name) for name in costs}


def add_stages(grid: Table, stages: PipelineStages, options: PlanOptions) -> None:
    """Add the cost of pipeline stages to a summary."""
    link = f"{stages.state_bytes:,} bytes per token, {stages.link_ms:.3g} ms per micro-batch"
    grid.add_row("hidden states", link)
    times = ", ".join(f"{each:.3g}" for each in stages.stage_ms)
    grid.add_row(f"{stages.pipeline} stages", f"{times} ms; a sequence passes them in {stages.pass_ms:.3g} ms")
    speedup = options.target_step_ms / stages.step_ms
    pays = f"{speedup:.2f} x one device" if speedup > 1 else "not faster than one device"
    step = f"{stages.step_ms:.3g} ms, {pays}; stages wait {stages.idle_share:.0%} of it"
    grid.add_row(f"decode step, {stages.micro_batches} under way", step)
    grid.add_row(
        "prompts", f"stages wait {stages.bubble_share:.0%} of a forward of {stages.micro_batches} micro-batches"
    )


def split_json(split: ColumnSplit) -> dict[str, Any]:
    """The split and its cost, of JSON types only."""
    costs = ("layer_bytes", "token_bytes", "num_gathers", "gather_ms", "step_ms", "speedup")
    return asdict(split) | {"layer_gathers": GATHERS_PER_LAYER} | {name: getattr(split, name) for name in costs}


def add_split(grid: Table, split: ColumnSplit) -> None:
    """Add the cost of a split to a summary."""
    grid.add_row("gathers of a layer", f"{GATHERS_PER_LAYER}, {split.layer_bytes:,} bytes per token")
    step = f"{split.num_gathers}, {split.token_bytes:,} bytes per token: {split.gather_ms:.3g} ms"
    grid.add_row("gathers of a step", step)
    cost = f"{split.target_step_ms:g} / {split.devices} + {split.gather_ms:.3g} = {split.step_ms:.3g} ms"
    pays = f"{split.speedup:.2f} x one device" if split.speedup > 1 else "slower than one device"
    grid.add_row(f"decode step, {split.devices} devices", f"{cost}, {pays}")


def as_json(planned: Plan) -> dict[str, Any]:
    """The plan, of JSON types only, with the best draft lengths; 0 if decoding without speculation is faster."""
    best = {"synchronous": planned.best_synchronous, "overlapped": planned.best_overlapped}
    return asdict(planned) | {
        "tokens_per_s": planned.tokens_per_s(),
        "best": {name: _best_json(planned, name, one) for name, one in best.items()},
    }


def _best_json(planned: Plan, name: str, best: PlannedRound) -> dict[str, Any]:
    mode: PlannedMode = getattr(best, name)
    pays = mode.speedup > 1
    return {
        "num_draft_tokens": best.num_draft_tokens if pays else 0,
        "speedup": max(1.0, mode.speedup),
        "tokens_per_s": planned.tokens_per_s(mode if pays else None),
    }


def summary(planned: Plan) -> Table:
    """The inputs and the best draft length of both modes."""
    inputs = planned.inputs
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column()
    grid.add_row(
        "decode step", f"{inputs.target_step_ms:g} ms, batch {inputs.batch}: {planned.tokens_per_s():.1f} tokens/s"
    )
    grid.add_row("draft forward", f"{inputs.draft_step_ms:g} ms, {inputs.draft}: c = {inputs.draft_ratio:.3f}")
    grid.add_row("acceptance", f"{inputs.acceptance:g}; overlapped rounds: hit rate {inputs.hit_rate:g}")
    if planned.decode_experts is not None:
        grid.add_row("experts", f"{planned.decode_experts:.1f} of {inputs.experts} distinct per layer in a decode step")
    grid.add_row("synchronous", _best(planned, planned.best_synchronous, planned.best_synchronous.synchronous))
    grid.add_row("overlapped", _best(planned, planned.best_overlapped, planned.best_overlapped.overlapped))
    return grid


def _best(planned: Plan, best: PlannedRound, mode: PlannedMode) -> str:
    if mode.speedup <= 1:
        speed = f"does not pay off: at best {mode.speedup:.2f} x, at K = {best.num_draft_tokens}"
    else:
        tokens_per_s = planned.tokens_per_s(mode)
        speed = f"{mode.speedup:.2f} x at K = {best.num_draft_tokens}, {tokens_per_s:.1f} tokens/s"
    stops = f"stops paying off beyond beta {mode.break_even_verify_ratio:.2f} or c {mode.break_even_draft_ratio:.3f}"
    return f"{speed}; {stops}"


def table(planned: Plan) -> Table:
    """Expected speeds by draft length; the best of each mode is marked."""
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1))
    is_moe = planned.decode_experts is not None
    for header in ("K", "tau", *(("experts",) if is_moe else ()), "beta", "synchronous", "overlapped"):
        grid.add_column(header, justify="right")
    for one in planned.rounds:
        marks = [" *" if one is best else "  " for best in (planned.best_synchronous, planned.best_overlapped)]
        grid.add_row(
            str(one.num_draft_tokens),
            f"{one.block_length:.2f}",
            *((f"{one.verify_experts:.1f}",) if is_moe else ()),
            f"{one.verify_ratio:.2f}",
            f"{one.synchronous.speedup:.2f}{marks[0]}",
            f"{one.overlapped.speedup:.2f}{marks[1]}",
        )
    return grid
