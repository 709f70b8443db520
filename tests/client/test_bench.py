"""`betoken bench` against an endpoint in this process."""

import json

import pytest

from tests.client.command import run
from tests.loadtest.fake_endpoint import METRICS, FakeEndpoint, serving


@pytest.fixture
def fake():
    with serving(FakeEndpoint()) as fake:
        yield fake


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "one"}\n{"turns": ["two", "three"]}\n')
    return str(path)


def test_bench_measures_each_load_and_writes_results_and_plots(fake, prompts, tmp_path):
    fake.counters = [METRICS, METRICS.replace(" 10.0", " 14.0")]
    out, folder = tmp_path / "results.json", tmp_path / "plots"
    loads = ["--concurrency", "1", "--concurrency", "2", "--request-rate", "100"]
    written = ["--out", str(out), "--plot", str(folder), "--json"]
    options = ["--url", fake.url, "--prompts", prompts, "--num-prompts", "4", "--max-tokens", "9", "--temperature", "0"]
    result = run("bench", *options, *loads, *written, "--goodput", "ttft:5000", "tpot:2000")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told == json.loads(out.read_text())
    assert [one["load"]["concurrency"] for one in told["runs"]] == [1, 2, None]
    assert all(one["num_requests"] == 4 and not one["num_failed"] for one in told["runs"])
    assert told["runs"][0]["goodput"]["limits_ms"] == {"ttft": 5000.0, "tpot": 2000.0}
    assert told["runs"][0]["acceptance"]["num_drafts"] == 4
    assert len(fake.bodies) == 1 + 3 * 4 + 1  # a warm-up, and the timeline's
    assert {path for path, _ in fake.bodies} == {"/v1/completions", "/v1/chat/completions"}
    assert all(body["seed"] == 0 and body["max_tokens"] == 9 for _, body in fake.bodies)
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.rpartition("/")[2] for path in told["plots"])


def test_bench_prints_latencies_and_throughput(fake, prompts):
    result = run("bench", "--url", fake.url, "--prompts", prompts, "--goodput", "ttft:5000", env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "first token" in result.output and "between chunks" in result.output and "1 streams" in result.output


def test_bench_asks_our_gateway_for_the_rounds_of_its_timeline(fake, prompts, tmp_path):
    fake.owner = "betoken"
    options = [
        "--url",
        fake.url,
        "--prompts",
        prompts,
        "--api",
        "chat",
        "--body",
        '{"top_k": 5, "betoken": {"off": true}}',
    ]
    assert run("bench", *options, "--plot", str(tmp_path)).exit_code == 0
    assert fake.bodies[0][1]["betoken"] == {"off": True} and fake.bodies[0][1]["top_k"] == 5
    assert fake.bodies[-1][1]["betoken"] == {"off": True, "rounds": True}


def test_bench_fails_if_no_request_is_answered(fake, prompts):
    fake.status = 503
    result = run("bench", "--url", fake.url, "--prompts", prompts)
    assert result.exit_code == 1
    assert "UNAVAILABLE: all 2 requests failed, the first with: 503: not today" in result.output


@pytest.mark.parametrize(
    "options, error",
    [
        (["--prompts", "/no/such/file"], "--prompts = /no/such/file: cannot be used, No such file"),
        (["--concurrency", "0"], "--concurrency = 0: must be above 0"),
        (["--request-rate", "nan"], "--request-rate = nan: must be above 0"),
        (["--goodput", "itl:5"], "--goodput = itl:5: must be NAME:MS"),
        (["--body", "[]"], "--body = []: must be a JSON object"),
        (["--url", "localhost"], "--url = localhost: must be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1"], "UNAVAILABLE: http://127.0.0.1:1 does not list its models"),
    ],
)
def test_bench_reports_a_value_that_cannot_be_used_with_its_option(prompts, options, error):
    result = run("bench", *([] if "--prompts" in options else ["--prompts", prompts]), *options)
    assert result.exit_code == 1 and error in result.output
