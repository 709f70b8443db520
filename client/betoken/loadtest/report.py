"""Statistics of a run: latencies, throughput, goodput under limits, acceptance. Knows numbers only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from betoken.common.errors import InvalidArgumentError
from betoken.loadtest.acceptance import Acceptance, total
from betoken.loadtest.record import Record

LIMITED = ("ttft", "tpot", "e2el")
"""Latencies that goodput can limit, by vLLM's names: time to first token, time per output token, end to end."""
PERCENTILES = (50, 95, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a run: a number of streams, or a request rate."""

    concurrency: int | None = None
    request_rate: float | None = None

    def __str__(self) -> str:
        return f"{self.request_rate:g} requests/s" if self.concurrency is None else f"{self.concurrency} streams"


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Return goodput limits in milliseconds by latency, of texts such as `ttft:500`.

    Raises:
        InvalidArgumentError: another latency, or no positive number.
    """
    limits = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limit = float(number)
        except ValueError:
            limit = 0.0
        if name not in LIMITED or not (math.isfinite(limit) and limit > 0):
            raise InvalidArgumentError("goodput", text, f"must be NAME:MS, of {', '.join(LIMITED)}, and MS above 0")
        limits[name] = limit
    return limits


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile of sorted values, with linear interpolation between the closest ranks."""
    rank = percent / 100 * (len(values) - 1)
    low = math.floor(rank)
    high = min(low + 1, len(values) - 1)
    return values[low] + (rank - low) * (values[high] - values[low])


def distribution(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean and percentiles, in milliseconds, of values in seconds; None without values."""
    if not values:
        return None
    ordered = sorted(1e3 * value for value in values)
    percentiles = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered)} | percentiles


def report(
    load: Load, records: Sequence[Record], limits: Mapping[str, float], counted: Acceptance | None
) -> dict[str, Any]:
    """Return the statistics of a run, of JSON types only.

    Args:
        counted: acceptance that the server counted during the run; used if responses report none.
    """
    ended = [record for record in records if not record.error]
    duration_s = max((record.arrival_s + record.end_s for record in records), default=0.0)
    prompt_tokens, output_tokens = (
        sum(getattr(record, name) for record in ended) for name in ("num_prompt_tokens", "num_output_tokens")
    )
    acceptance = total(record.acceptance for record in ended) or counted
    return {
        "load": {"concurrency": load.concurrency, "request_rate": load.request_rate},
        "num_requests": len(records),
        "num_failed": len(records) - len(ended),
        "errors": dict(Counter(record.error for record in records if record.error).most_common()),
        "duration_s": duration_s,
        "num_prompt_tokens": prompt_tokens,
        "num_output_tokens": output_tokens,
        "requests_per_s": _rate(len(ended), duration_s),
        "output_tokens_per_s": _rate(output_tokens, duration_s),
        "total_tokens_per_s": _rate(prompt_tokens + output_tokens, duration_s),
        "ttft_ms": distribution([record.ttft_s for record in ended]),
        "tpot_ms": distribution([record.tpot_s for record in ended if record.tpot_s is not None]),
        "itl_ms": distribution([gap for record in ended for gap in record.gaps_s]),
        "e2el_ms": distribution([record.end_s for record in ended]),
        "goodput": _goodput(ended, limits, duration_s) if limits else None,
        "acceptance": acceptance.as_json() if acceptance is not None else None,
    }


def _goodput(ended: Sequence[Record], limits: Mapping[str, float], duration_s: float) -> dict[str, Any]:
    """Requests per second that meet all limits; one without a second token meets any limit of `tpot`."""
    num_met = 0
    for record in ended:
        latencies = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2el": record.end_s}
        num_met += all(1e3 * latencies[name] <= limit for name, limit in limits.items())
    return {"limits_ms": dict(limits), "num_requests": num_met, "requests_per_s": _rate(num_met, duration_s)}


def _rate(number: float, duration_s: float) -> float:
    return number / duration_s if duration_s > 0 else 0.0
