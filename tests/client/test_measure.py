"""`betoken measure`: values of a plan out of answers, and the command against a router with fake workers."""

import asyncio
import json
from dataclasses import replace

import pytest

from betoken.cli.measured import measured, shared_probability, table_ratio
from betoken.client import Completion, InvalidArgumentError, StepCost
from betoken.common.economy.plan import DraftKind
from betoken.router.text.tokenizer import Tokenizer
from betoken.v1 import generation_pb2 as pb
from tests.client.command import run
from tests.router.harness import CHAT_TEMPLATE, byte_tokenizer_json, running_cluster

MS = 1_000_000


def answer(num_tokens: int, decode_ms: int, **stats) -> Completion:
    finish = pb.GenerateFinish(speculation=pb.SpeculationStats(**stats), usage=pb.Usage(output_tokens=num_tokens))
    finish.time_to_first_token_ns, finish.duration_ns = 50 * MS, (50 + decode_ms) * MS
    return Completion.from_proto(pb.GenerateStart(drafter="model"), (), finish, 0)


PLAIN = answer(41, 800, num_verify_forwards=40, verify_forward_ns=800 * MS)
DRAFTED = answer(
    41,
    400,
    num_verify_forwards=10,
    verify_forward_ns=240 * MS,
    num_rounds=11,
    draft_forward_ns=180 * MS,
    first_draft_forward_ns=100 * MS,
    router_overhead_p50_ns=2 * MS,
    num_drafts=10,
    num_draft_tokens=40,
    num_accepted_tokens=30,
    num_accepted_per_position=[9, 8, 7, 6],
    num_drafted_per_position=[10, 10, 10, 10],
    draft_outcomes=[pb.DraftOutcomes(length=4, num_drafts_by_accepted=[1, 1, 1, 1, 6])],
)


def test_measured_values_equal_those_by_hand():
    result = measured([PLAIN], [DRAFTED], 4, hit_rate=0.5)
    inputs = result.inputs
    assert inputs.target_step_ms == pytest.approx(20.0)
    assert result.verify_ratio == pytest.approx(1.2)
    assert inputs.verify_ratio(4) == pytest.approx(1.2)
    assert inputs.draft_step_ms == pytest.approx(2.0)  # ten rounds of four forwards, without the prompt's
    assert inputs.rtt_ms == pytest.approx(1.0)
    assert inputs.acceptance == pytest.approx(30 / 34)  # four drafts were rejected at some token
    assert result.acceptance_by_position == (0.9, 0.8, 0.7, 0.6)
    assert result.block_length == pytest.approx(4.0)
    assert result.speedup == pytest.approx(2.0)
    tau = (1 - (30 / 34) ** 5) / (4 / 34)
    assert result.predicted_speedup == pytest.approx(tau / (1.2 + 0.4 + 0.1))


def test_the_measured_hit_rate_of_overlapped_rounds_is_that_of_the_answers():
    stats = replace(DRAFTED.speculation, num_ahead_hits=6, num_ahead_misses=4)
    result = measured([PLAIN], [replace(DRAFTED, speculation=stats)], 4, hit_rate=0.1)
    inputs, tau = result.inputs, (1 - (30 / 34) ** 5) / (4 / 34)
    assert (result.is_overlapped, inputs.hit_rate) == (True, 0.6)
    assert inputs.draft_step_ms == pytest.approx(5.0)  # four rounds of four forwards
    assert inputs.rtt_ms == pytest.approx(2 / 1.4)
    hop = inputs.rtt_ms / 20
    assert result.predicted_speedup == pytest.approx(tau / (hop + 0.6 * 1.25 + 0.4 * (1.2 + 1.0 + hop)))


def test_a_measured_parallel_drafter_has_one_forward_per_round():
    result = measured([PLAIN], [DRAFTED], 4, 0.5, DraftKind.PARALLEL)
    assert result.inputs.draft_step_ms == pytest.approx(8.0)
    assert result.inputs.costs(4).drafting(4) == pytest.approx(0.4)


def test_a_measurement_without_drafts_is_rejected():
    stats = replace(DRAFTED.speculation, num_drafts=0)
    with pytest.raises(InvalidArgumentError, match="drafter = model: must draft"):
        measured([PLAIN], [replace(DRAFTED, speculation=stats)], 4, 0.5)


def test_a_measurement_of_answers_without_a_decode_step_is_rejected():
    with pytest.raises(InvalidArgumentError, match="max_new_tokens"):
        measured([answer(1, 1, num_verify_forwards=0)], [DRAFTED], 4, 0.5)


def test_the_shared_probability_is_the_acceptance_of_rejection_sampling():
    rejection = [
        answer(9, 1, num_drafts=60, num_accepted_tokens=45),
        answer(9, 1, num_drafts=40, num_accepted_tokens=35),
    ]
    assert shared_probability(rejection) == (pytest.approx(0.8), pytest.approx(0.04))
    with pytest.raises(InvalidArgumentError, match="drafter = model: must draft"):
        shared_probability([answer(9, 1)])


def test_the_total_variation_of_greedy_answers_is_not_measured(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n')
    result = run("measure", "--prompts", str(tmp_path / "prompts.jsonl"), "--total-variation")
    assert result.exit_code == 1 and "temperature = 0: must be above 0 with --total-variation" in result.output


def test_the_ratio_of_a_table_of_step_times_is_interpolated():
    costs = [StepCost(rows, context, time_s) for rows, context, time_s in ((8, 64, 0.03), (1, 64, 0.02), (8, 512, 0.9))]
    assert table_ratio(costs, 1) == pytest.approx(1.0)
    assert table_ratio(costs, 5) == pytest.approx(1 + 0.5 * 4 / 7)
    assert table_ratio(costs, 9) is None and table_ratio([], 1) is None


def test_measure_reports_a_file_that_is_no_prompts(tmp_path):
    result = run("measure", "--prompts", str(tmp_path / "none.jsonl"))
    assert result.exit_code == 1 and "--prompts = " in result.output and "cannot be used" in result.output


async def test_measure_prints_the_prediction_next_to_the_measurement(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the"}\n{"turns": ["a"]}\n')
    tokenizer = Tokenizer(byte_tokenizer_json(), {"eos_token": "<eos>"}, CHAT_TEMPLATE, "test")
    async with running_cluster(tokenizer) as cluster:
        options = ["--address", cluster.address, "--prompts", str(tmp_path / "prompts.jsonl"), "--num-prompts", "2"]
        shown = await asyncio.to_thread(run, "measure", *options, env={"COLUMNS": "160"})
        assert shown.exit_code == 0, shown.output
        assert "measured" in shown.output and "predicted" in shown.output
        told = json.loads((await asyncio.to_thread(run, "measure", *options, "--json")).stdout)
    result = told["measured"]
    assert result["num_draft_tokens"] == 4 and 0 < result["inputs"]["acceptance"] <= 1
    assert result["speedup"] > 0 and result["predicted_speedup"] > 0
    assert len(told["plan"]["rounds"]) == 16
