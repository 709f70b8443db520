"""`betoken plan`: a table or one JSON object, and errors that name the option."""

import json
from pathlib import Path

import pytest

from tests.client.command import run

MODELS = Path(__file__).parents[2] / "models"
DENSE = ["--target-step-ms", "20", "--draft-step-ms", "2", "--acceptance", "0.8"]


def test_plan_prints_the_best_draft_length_of_both_modes():
    result = run("plan", *DENSE, "--hit-rate", "1", env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    assert "2.47 x at K = 6" in result.output and "4.46 x at K = 9" in result.output
    assert "stops paying off beyond beta 3.35 or c 0.492" in result.output


def test_plan_prints_one_json_object():
    planned = json.loads(run("plan", *DENSE, "--experts", "128", "--active", "8", "--json").stdout)
    assert planned["inputs"]["acceptance"] == 0.8 and len(planned["rounds"]) == 16
    assert planned["decode_experts"] == pytest.approx(8.0)
    assert planned["best"]["synchronous"]["num_draft_tokens"] == 0  # each token reads other experts
    assert planned["best"]["synchronous"]["speedup"] == 1.0


def test_plan_says_if_speculation_does_not_pay_off():
    result = run("plan", *DENSE[:4], "--acceptance", "0.05", env={"COLUMNS": "160"})
    assert "does not pay off: at best 0.95 x, at K = 1" in result.output


@pytest.mark.parametrize("as_json", [False, True])
def test_plan_reports_a_bad_value_with_its_option_and_limit(as_json):
    result = run("plan", *DENSE[:4], "--acceptance", "1.5", *(["--json"] if as_json else []))
    assert result.exit_code == 1
    if as_json:
        error = json.loads(result.stdout)["error"]
        assert (error["field"], error["value"], error["limit"]) == ("acceptance", "1.5", "must be 0 to 1")
    else:
        assert "INVALID_ARGUMENT: --acceptance = 1.5: must be 0 to 1" in result.output


def test_plan_requires_the_step_times_and_the_acceptance():
    result = run("plan", "--target-step-ms", "20", "--acceptance", "0.5")
    assert result.exit_code == 2 and "--draft-step-ms" in result.output


def test_plan_prints_the_gathers_of_a_target_on_two_devices():
    split = ["--devices", "2", "--link-gb-s", "50", "--model", str(MODELS / "target")]
    planned = json.loads(run("plan", *DENSE, *split, "--json").stdout)["column_split"]
    shape = planned["shape"]
    assert planned["layer_bytes"] == 2 * (
        shape["attention_size"] + 2 * shape["hidden_size"] + shape["intermediate_size"]
    )
    assert (planned["layer_gathers"], planned["num_gathers"]) == (4, 4 * shape["num_layers"] + 2)
    assert planned["step_ms"] == pytest.approx(10 + planned["gather_ms"]) and 1.8 < planned["speedup"] < 2
    text = run("plan", *DENSE, *split, "--gather-us", "1000", env={"COLUMNS": "160"}).output
    assert f"4, {planned['layer_bytes']:,} bytes per token" in text and "slower than one device" in text


STAGES = ["--pipeline", "2", "--stage-link-gb-s", "1.25", "--model", str(MODELS / "target")]


def test_plan_prints_the_step_of_two_stages():
    planned = json.loads(run("plan", *DENSE, *STAGES, "--batch", "8", "--json").stdout)["pipeline"]
    assert (planned["micro_batches"], planned["state_bytes"]) == (2, 2 * planned["shape"]["hidden_size"])
    assert planned["step_ms"] == pytest.approx(max(planned["pass_ms"], 2 * max(planned["stage_ms"])))
    assert planned["bubble_share"] == pytest.approx(1 / 3) and sum(planned["stage_ms"]) == pytest.approx(20)
    text = run("plan", *DENSE, *STAGES, env={"COLUMNS": "160"}).output
    assert "decode step, 1 under way" in text and "not faster than one device; stages wait 50% of it" in text


def test_plan_gives_a_micro_batch_its_part_of_the_sequences_and_of_the_devices():
    options = [*DENSE, *STAGES, "--batch", "8", "--token-ms", "1", "--devices", "2", "--link-gb-s", "50", "--json"]
    planned = json.loads(run("plan", *options).stdout)
    assert (planned["column_split"]["target_step_ms"], planned["column_split"]["batch"]) == (16, 4)
    assert planned["pipeline"]["target_step_ms"] == pytest.approx(planned["column_split"]["step_ms"])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--pipeline", "2", "--stage-link-gb-s", "1"], "model"),
        (["--pipeline", "2", "--model", str(MODELS / "target")], "stage_link_gb_s"),
        ([*STAGES, "--pipeline", "65"], "pipeline"),
        ([*STAGES, "--micro-batches", "2"], "micro_batches"),
        ([*STAGES, "--micro-batches", "0"], "micro_batches"),
        ([*STAGES, "--batch", "8", "--token-ms", "5"], "token_ms"),
        (["--micro-batches", "2"], "micro_batches"),
        (["--model", str(MODELS / "target")], "model"),
        (["--devices", "2", "--link-gb-s", "50"], "model"),
        (["--devices", "2", "--model", str(MODELS / "target")], "link_gb_s"),
        (["--devices", "65", "--link-gb-s", "50", "--model", str(MODELS / "target")], "devices"),
        (["--devices", "2", "--link-gb-s", "0", "--model", str(MODELS / "target")], "link_gb_s"),
        (["--devices", "2", "--link-gb-s", "50", "--model", "/absent"], "model"),
        (["--link-gb-s", "50"], "link_gb_s"),
    ],
)
def test_plan_reports_the_option_of_a_split_that_is_missing_or_out_of_range(options, field):
    result = run("plan", *DENSE, *options, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["error"]["field"] == field
