"""Requests to an endpoint in this process: what is measured, and how failures are reported."""

import time

import pytest

from betoken.common.errors import InvalidArgumentError, UnavailableError
from betoken.loadtest.endpoint import Endpoint
from betoken.loadtest.prompts import Prompt
from betoken.loadtest.record import Record, RequestOptions, ask
from tests.loadtest.fake_endpoint import REPORTED, FakeEndpoint, serving


@pytest.fixture
def fake():
    with serving(FakeEndpoint()) as fake:
        yield fake


def asked(fake, *, is_chat=False, endpoint=None, **fields) -> Record:
    record = Record(Prompt(0, "count", is_chat=is_chat))
    options = RequestOptions("m", 16, fields=fields)
    ask(endpoint or Endpoint(fake.url), options, record, time.perf_counter())
    return record


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_record_of_a_request_has_the_times_of_its_chunks(fake, is_chat):
    fake.pauses_s = [0.1, 0.05, 0.05]
    record = asked(fake, is_chat=is_chat, temperature=0)
    assert not record.error and len(record.chunk_s) == 3
    assert (record.num_prompt_tokens, record.num_output_tokens) == (7, 6)
    assert 0.1 <= record.ttft_s < record.chunk_s[1] < record.end_s
    assert min(record.gaps_s) >= 0.04
    assert record.tpot_s == pytest.approx(sum(record.gaps_s) / 5)
    ((path, body),) = fake.bodies
    text = {"messages": [{"role": "user", "content": "count"}]} if is_chat else {"prompt": "count"}
    assert path == ("/v1/chat/completions" if is_chat else "/v1/completions")
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    assert body == text | stream | {"model": "m", "max_tokens": 16, "temperature": 0}


def test_a_record_has_the_acceptance_of_the_last_event(fake):
    fake.metrics = {"speculative_decoding": REPORTED}
    accepted = asked(fake).acceptance
    assert accepted is not None and (accepted.num_drafts, accepted.by_position) == (2, [1.0, 0.5])


def test_requests_of_one_stream_share_a_connection(fake):
    endpoint = Endpoint(f"{fake.url}/v1/")
    assert not any(asked(fake, endpoint=endpoint).error for _ in range(3))
    assert fake.num_connections == 1


def test_a_request_that_fails_is_recorded_with_the_servers_message(fake):
    fake.status = 429
    assert asked(fake).error == "429: not today"
    fake.status, fake.is_cut_off = 200, True
    assert asked(fake).error == "the stream ended before [DONE]"
    fake.is_cut_off, fake.pauses_s = False, []
    assert asked(fake).error == "no text"


@pytest.mark.parametrize(
    "event, error",
    [
        ([], "an event is not an object"),
        ({"choices": ["a"]}, "an event does not follow OpenAI's protocol"),
        ({"choices": [], "usage": 3}, "an event does not follow OpenAI's protocol"),
        ({"error": {"message": "lost"}}, "lost"),
    ],
)
def test_a_request_with_an_unknown_event_is_recorded_as_failed(fake, monkeypatch, event, error):
    monkeypatch.setattr(fake, "events", lambda path: iter([event]))
    assert asked(fake).error == error


def test_an_endpoint_names_the_models_it_serves(fake):
    fake.owner = "betoken"
    assert Endpoint(fake.url).served() == Endpoint(fake.url).served("m")
    assert Endpoint(fake.url).served().is_betoken
    with pytest.raises(InvalidArgumentError, match="model = other: must be one of those served, m"):
        Endpoint(fake.url).served("other")


def test_an_endpoint_that_cannot_be_reached_is_unavailable():
    with serving(FakeEndpoint()) as gone:
        pass
    with pytest.raises(UnavailableError, match="does not list its models"):
        Endpoint(gone.url).served()


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://a", "http://", "http://a:b", "http://a?b=c", "http://[::1"])
def test_an_endpoint_rejects_another_url(url):
    with pytest.raises(InvalidArgumentError, match="url"):
        Endpoint(url)
