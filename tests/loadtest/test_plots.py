"""Plots of a load test."""

import importlib.util

import pytest

from betoken.common.errors import FailedPreconditionError
from betoken.loadtest.plots import check_plotting, lanes, write_plots
from betoken.loadtest.prompts import Prompt
from betoken.loadtest.record import Record

TIMES = {"draft_queue_s": 0.001, "draft_forward_s": 0.004, "verify_queue_s": 0.0, "verify_forward_s": 0.02}


def round_times(begin_s, num_draft, num_accepted, **changed):
    numbers = {"num_tokens": num_accepted + 1, "num_draft_tokens": num_draft, "num_accepted_tokens": num_accepted}
    return TIMES | numbers | {"begin_s": begin_s, "duration_s": 0.03} | changed


ROUNDS = [round_times(0.0, 4, 4), round_times(0.03, 4, 1), round_times(0.06, 4, 0)]
ROUNDS.append(round_times(0.09, 0, 0, draft_forward_s=0.0))


def test_lanes_of_a_timeline_have_drafts_first_and_verifications_last():
    bars = lanes(ROUNDS)
    assert sum(bars["draft"], ()) == pytest.approx((1.0, 4.0, 31.0, 4.0, 61.0, 4.0))
    assert sum(bars["whole"], ()) == pytest.approx((10.0, 20.0))
    assert sum(bars["partly"], ()) == pytest.approx((40.0, 20.0))
    assert sum(bars["rejected"], ()) == pytest.approx((70.0, 20.0))
    assert sum(bars["decode"], ()) == pytest.approx((100.0, 20.0))


def test_plots_are_png_files_of_what_was_measured(tmp_path):
    accepted = {"by_position": [0.9, 0.5]}
    loads = [{"concurrency": 1, "request_rate": None}, {"concurrency": 4, "request_rate": None}]
    runs = [{"load": load, "output_tokens_per_s": 10.0, "acceptance": accepted} for load in loads]
    runs.append({"load": {"concurrency": None, "request_rate": 2.0}, "output_tokens_per_s": 5.0, "acceptance": None})
    record = Record(Prompt(0, "x"), chunk_s=[0.03, 0.06], rounds=ROUNDS)
    written = write_plots(tmp_path / "new", runs, record)
    names = ["tokens_per_s_by_concurrency", "tokens_per_s_by_request_rate", "acceptance_by_position", "timeline"]
    assert [path.name for path in written] == [f"{name}.png" for name in names]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    assert [path.stem for path in write_plots(tmp_path, runs[2:], None)] == ["tokens_per_s_by_request_rate"]


def test_plots_without_matplotlib_are_rejected_with_the_extra_that_brings_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FailedPreconditionError, match=r"plots need matplotlib: .*\.\[bench\]"):
        check_plotting()
