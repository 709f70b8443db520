"""Rounds of attached drafters are reported like remote ones: to OpenTelemetry and to Prometheus."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families

from betoken.common import names
from betoken.rpc import telemetry
from tests.e2e import attached
from tests.e2e.in_process import Running, running
from tests.gateway.conftest import Gate, running_gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "7 is 7 and 7 is 7, so 7 is "
FIELDS = {"seed": 5, "max_new_tokens": 96, "ignore_eos": True, "num_draft_tokens": 8}
TEMPERATURES = attached.TEMPERATURES | {"model": 0.8}
COUNTS = {
    names.METRIC_DRAFTS: "num_drafts",
    names.METRIC_DRAFT_TOKENS: "num_draft_tokens",
    names.METRIC_ACCEPTED_TOKENS: "num_accepted_tokens",
}


@pytest.fixture(scope="module")
def reader() -> Iterator[InMemoryMetricReader]:
    """Reads all metrics of services that are made after it."""
    reader = InMemoryMetricReader()
    meter = MeterProvider([reader]).get_meter("test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(telemetry, "meter", lambda: meter)
        yield reader


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(reader: InMemoryMetricReader, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder: Path = tmp_path_factory.mktemp("pair")
    async with running(folder, {"drafters": ("model",)}, attached.save_attached(folder)) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gate(stack: Running) -> AsyncIterator[Gate]:
    async with running_gateway(None, stack.address) as gate:
        yield gate


def reported(reader: InMemoryMetricReader, drafter: str) -> dict[Any, float]:
    """Values of the drafter's counters; of those by position, by name and position."""
    data = reader.get_metrics_data()
    metrics = data.resource_metrics[0].scope_metrics[0].metrics if data is not None else []
    points = [(metric.name, point) for metric in metrics for point in metric.data.data_points]
    return {
        (name, position) if (position := point.attributes.get(names.DRAFT_POSITION)) is not None else name: point.value
        for name, point in points
        if point.attributes.get(names.DRAFTER) == drafter and hasattr(point, "value")
    }


@pytest.mark.parametrize("drafter", TEMPERATURES)
async def test_opentelemetry_is_reported_what_the_answer_says(
    stack: Running, reader: InMemoryMetricReader, drafter: str
) -> None:
    before = reported(reader, drafter)
    fields = FIELDS | {"temperature": TEMPERATURES[drafter]}
    stats = (await stack.client.complete(PROMPT, drafter=drafter, **fields)).speculation
    brought = {key: value - before.get(key, 0) for key, value in reported(reader, drafter).items()}
    assert {name: brought[name] for name in COUNTS} == {name: getattr(stats, field) for name, field in COUNTS.items()}
    per_position = [
        brought[names.METRIC_ACCEPTED_TOKENS_PER_POSITION, position]
        for position in range(len(stats.num_accepted_per_position))
    ]
    assert per_position == list(stats.num_accepted_per_position)
    assert brought.get(names.METRIC_FAILED_DRAFTS, 0) == 0
    assert 0 < stats.num_accepted_tokens < stats.num_draft_tokens


async def samples(gate: Gate) -> dict[tuple[str, ...], float]:
    text = (await gate.http.get("/metrics")).text
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize("drafter", TEMPERATURES)
async def test_prometheus_is_reported_what_the_answer_says(gate: Gate, drafter: str) -> None:
    before = await samples(gate)
    asked = {name: value for name, value in FIELDS.items() if name not in ("max_new_tokens", "num_draft_tokens")}
    body = {"prompt": PROMPT, "max_tokens": 96, "temperature": TEMPERATURES[drafter], **asked}
    body["betoken"] = {"drafter": drafter, "num_draft_tokens": 8}
    reply = (await gate.post("/v1/completions", body)).json()
    stats = reply["choices"][0]["betoken"]["speculation"]
    brought = {key: value - before.get(key, 0) for key, value in (await samples(gate)).items()}
    for field in COUNTS.values():
        (total,) = [value for key, value in brought.items() if key[0] == f"betoken_{field.removeprefix('num_')}_total"]
        assert total == stats[field] > 0
    by_source = {key[1:]: value for key, value in brought.items() if key[0] == "betoken_output_tokens_total" and value}
    assert sum(by_source.values()) == 96
    assert [value for labels, value in by_source.items() if drafter in labels] == [stats["num_accepted_tokens"]]
