"""Acceptance out of responses and out of Prometheus counters."""

import pytest

from betoken.loadtest.acceptance import Acceptance, of_event, of_metrics, total
from tests.loadtest.fake_endpoint import METRICS, REPORTED

DOCUMENTED = {  # the example of vLLM's page
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "acceptance_histogram_by_draft_length": {"3": [39, 1, 0, 3]},
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}


def test_acceptance_of_vllms_documented_response_has_its_rates():
    told = of_event({"metrics": {"speculative_decoding": DOCUMENTED}})
    assert told is not None
    assert told.mean_acceptance_length == DOCUMENTED["mean_acceptance_length"]
    assert told.rate == DOCUMENTED["draft_acceptance_rate"]
    assert told.by_position == pytest.approx([4 / 43, 3 / 43, 3 / 43])


def test_acceptance_by_position_counts_drafts_that_reach_the_position():
    varied = {
        "acceptance_histogram": [1, 2, 1],
        "acceptance_histogram_by_draft_length": {"1": [1, 1], "2": [0, 1, 1]},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 6,
    }
    told = of_event({"metrics": {"speculative_decoding": varied}})
    assert told is not None and told.by_position == [0.75, 0.5]
    del varied["acceptance_histogram_by_draft_length"]  # older versions have no lengths
    told = of_event({"metrics": {"speculative_decoding": varied}})
    assert told is not None and told.by_position == [0.75, 0.25]


@pytest.mark.parametrize("event", [{}, {"metrics": None}, {"metrics": {"speculative_decoding": None}}, {"metrics": []}])
def test_an_event_without_acceptance_has_none(event):
    assert of_event(event) is None


def test_acceptance_of_a_run_is_the_difference_of_counters():
    after = METRICS.replace(" 10.0", " 14.0").replace(" 40.0", " 56.0").replace(" 15.0", " 21.0")
    after = after.replace(" 9.0", " 13.0").replace(" 6.0", " 8.0")
    first, last = of_metrics(METRICS), of_metrics(after)
    assert first is not None and last is not None
    assert last - first == Acceptance(4, 16, 6, (4, 2), (4, 4))
    assert of_metrics("# no counters\nup 1\n") is None


def test_the_total_acceptance_skips_requests_without_drafts():
    one = of_event({"metrics": {"speculative_decoding": REPORTED}})
    both = total([one, None, one])
    assert both is not None and (both.num_drafts, both.num_accepted_tokens, both.by_position) == (4, 6, [1.0, 0.5])
    assert total([None]) is None
