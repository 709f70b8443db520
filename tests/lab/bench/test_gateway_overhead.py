"""The benchmark of the HTTP gateway runs, and prints nothing if the two paths differ."""

from __future__ import annotations

import json

import pytest

from betoken.bench import gateway_overhead


def run(capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    options = ["--tokenizer", "models/target", "--streams", "2", "--turns", "2", "--max-new-tokens", "8"]
    status = gateway_overhead.main([*options, "--step-ms", "1"])
    return status, *capsys.readouterr()


def test_gateway_overhead_reports_both_paths_and_the_difference(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, errors = run(capsys)
    assert status == 0, errors
    (figures,) = json.loads(out.splitlines()[-1])["results"]
    assert figures["pairs"] == 4 and len(figures["http_first_ms"]) == 3
    assert all(figures[f"{side}_{name}_ms"][0] > 0 for side in ("grpc", "http") for name in ("first", "per_token"))


def test_no_figure_is_printed_where_an_answer_differs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = gateway_overhead.by_http
    monkeypatch.setattr(gateway_overhead, "by_http", lambda port, prompt, num, seed: asked(port, prompt, num, seed + 1))
    status, out, errors = run(capsys)
    assert status == 2 and out == "" and "another than by gRPC" in errors
