"""Plots of a load test as PNG files: tokens per second by load, acceptance by position, timeline of one generation.

matplotlib is imported when a plot is drawn.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.common.release import how_to_install
from betoken.loadtest.record import Record

_COLORS = {"draft": "#4c78a8", "whole": "#59a14f", "partly": "#f2b134", "rejected": "#e15759", "decode": "#bab0ac"}
_OUTCOMES = {
    "whole": "hit: whole draft accepted",
    "partly": "draft accepted in part",
    "rejected": "miss: draft rejected",
    "decode": "decode step",
}


def check_plotting() -> None:
    """Raises:
    FailedPreconditionError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise FailedPreconditionError(f"plots need matplotlib: {how_to_install('bench')}")


def write_plots(folder: Path, runs: Sequence[dict[str, Any]], traced: Record | None) -> list[Path]:
    """Write the plots that the results allow; return their files.

    Args:
        runs: results of `report`, one per load.
        traced: one generation for the timeline.

    Raises:
        FailedPreconditionError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    check_plotting()
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for key in ("concurrency", "request_rate"):
        if of_kind := [run for run in runs if run["load"][key] is not None]:
            written.append(_save(folder / f"tokens_per_s_by_{key}.png", lambda axes: _speed(axes, of_kind, key)))  # noqa: B023
    if accepted := [run for run in runs if (run["acceptance"] or {}).get("by_position")]:
        written.append(_save(folder / "acceptance_by_position.png", lambda axes: _acceptance(axes, accepted)))
    if traced is not None and not traced.error:
        written.append(_save(folder / "timeline.png", lambda axes: _timeline(axes, traced), width=12.0))
    return written


def _save(path: Path, draw: Any, width: float = 7.0) -> Path:
    figure_module = importlib.import_module("matplotlib.figure")  # no pyplot: no window, no global state
    figure = figure_module.Figure(figsize=(width, 4.0), layout="constrained")
    draw(figure.add_subplot())
    figure.savefig(path, dpi=120)
    return path


def _speed(axes: Any, runs: Sequence[dict[str, Any]], key: str) -> None:
    ordered = sorted(runs, key=lambda run: float(run["load"][key]))
    loads = [run["load"][key] for run in ordered]
    axes.plot(loads, [run["output_tokens_per_s"] for run in ordered], marker="o")
    axes.set_xlabel("streams" if key == "concurrency" else "requests per second")
    axes.set_ylabel("output tokens per second")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _acceptance(axes: Any, runs: Sequence[dict[str, Any]]) -> None:
    for run in runs:
        rates, load = run["acceptance"]["by_position"], run["load"]
        is_closed = load["concurrency"] is not None
        label = f"{load['concurrency']} streams" if is_closed else f"{load['request_rate']:g} requests/s"
        axes.plot(range(1, len(rates) + 1), rates, marker="o", label=label)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted share of drafts")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend()


def outcome(times: dict[str, Any]) -> str:
    """Return the outcome of a round: `whole`, `partly`, `rejected`, or `decode` without a draft."""
    num_draft, num_accepted = times["num_draft_tokens"], times["num_accepted_tokens"]
    if not num_draft:
        return "decode"
    return "whole" if num_accepted == num_draft else "partly" if num_accepted else "rejected"


def lanes(rounds: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return the (begin, duration) in milliseconds of draft forwards, and of verify forwards by outcome.

    A draft follows its queue time at the begin of a round; the verify forward is at the round's end.
    """
    bars: dict[str, list[tuple[float, float]]] = {name: [] for name in _COLORS}
    for times in rounds:
        if times["draft_forward_s"]:
            begin_s = times["begin_s"] + times["draft_queue_s"]
            bars["draft"].append((1e3 * begin_s, 1e3 * times["draft_forward_s"]))
        end_s = times["begin_s"] + times["duration_s"]
        forward_s = min(times["verify_forward_s"], times["duration_s"])
        bars[outcome(times)].append((1e3 * (end_s - forward_s), 1e3 * forward_s))
    return bars


def _timeline(axes: Any, record: Record) -> None:
    """Lanes of drafts and verifications, on the router's clock, and of the chunks' arrivals, on the client's."""
    bars = lanes(record.rounds)
    for name, spans in bars.items():
        if spans:
            label = "draft forward" if name == "draft" else _OUTCOMES[name]
            axes.broken_barh(spans, (2.1 if name == "draft" else 1.1, 0.8), color=_COLORS[name], label=label)
    axes.eventplot([[1e3 * arrival for arrival in record.chunk_s]], lineoffsets=0.5, linelengths=0.8, colors="black")
    axes.set_yticks([0.5, 1.5, 2.5], ["chunks", "verify", "draft"])
    axes.set_xlabel("milliseconds since the request")
    if any(bars.values()):
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.2), ncols=5, frameon=False)
