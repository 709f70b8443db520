"""Statistics of a load test by hand."""

import random

import numpy as np
import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.loadtest.acceptance import Acceptance
from betoken.loadtest.prompts import Prompt
from betoken.loadtest.record import Record
from betoken.loadtest.report import Load, distribution, parse_limits, percentile, report


def record(chunk_s: list[float], num_tokens: int, arrival_s: float = 0.0, error: str = "") -> Record:
    end_s = chunk_s[-1] if chunk_s else 0.0
    return Record(Prompt(0, "x"), arrival_s, chunk_s, end_s, 10, num_tokens, error)


@pytest.mark.parametrize("percent", [0, 50, 95, 99, 100])
def test_a_percentile_equals_numpys(percent):
    values = sorted(random.Random(0).uniform(0, 9) for _ in range(37))
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    assert percentile([3.0], percent) == 3.0


def test_a_distribution_of_latencies_is_in_milliseconds():
    assert distribution([0.003, 0.001]) == {"mean": 2.0, "p50": 2.0, "p95": 2.9, "p99": pytest.approx(2.98)}
    assert distribution([]) is None


def test_a_report_has_latencies_and_rates():
    records = [record([0.1, 0.2, 0.4], 7), record([0.3], 1, arrival_s=0.7), record([], 0, error="429: full")]
    told = report(Load(concurrency=2), records, {}, None)
    assert (told["num_requests"], told["num_failed"], told["errors"]) == (3, 1, {"429: full": 1})
    assert told["duration_s"] == pytest.approx(1.0)
    assert told["requests_per_s"] == pytest.approx(2.0)
    assert told["output_tokens_per_s"] == pytest.approx(8.0)
    assert told["total_tokens_per_s"] == pytest.approx(28.0)
    assert told["ttft_ms"]["mean"] == pytest.approx(200.0)
    assert told["tpot_ms"]["mean"] == pytest.approx(50.0)  # six tokens after the first in 0.3 s; one token has none
    assert told["itl_ms"]["mean"] == pytest.approx(150.0)
    assert told["e2el_ms"]["p50"] == pytest.approx(350.0)
    assert told["goodput"] is None and told["acceptance"] is None


def test_goodput_counts_requests_that_meet_all_limits():
    records = [record([0.1, 0.4], 7), record([0.6, 0.7], 3, arrival_s=1.3), record([0.1], 1)]
    told = report(Load(concurrency=1), records, {"ttft": 500.0, "tpot": 60.0}, None)
    assert told["goodput"]["num_requests"] == 2  # the second is late; the third has no second token
    assert told["goodput"]["requests_per_s"] == pytest.approx(1.0)
    assert report(Load(concurrency=1), records, {"tpot": 40.0}, None)["goodput"]["num_requests"] == 1


def test_a_report_prefers_acceptance_of_responses_to_the_servers_counters():
    of_response, counted = Acceptance(2, 8, 4, (2, 2), (2, 2)), Acceptance(9, 9, 0)
    records = [record([0.1], 1), record([0.1], 1)]
    assert report(Load(concurrency=1), records, {}, counted)["acceptance"]["num_drafts"] == 9
    records[0].acceptance = of_response
    told = report(Load(concurrency=1), records, {}, counted)["acceptance"]
    assert told["mean_acceptance_length"] == 3.0 and told["acceptance_rate"] == 0.5
    assert told["by_position"] == [1.0, 1.0]


def test_goodput_limits_are_read_by_name():
    assert parse_limits(["ttft:500", "tpot:50.5"]) == {"ttft": 500.0, "tpot": 50.5}


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:-1", "ttft:nan", "itl:5", ":5"])
def test_a_goodput_limit_that_is_none_is_rejected(text):
    with pytest.raises(InvalidArgumentError, match="goodput"):
        parse_limits([text])
