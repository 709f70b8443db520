"""The decode step of pipeline stages, compared with a schedule run event by event."""

from dataclasses import replace

import pytest

from betoken.common.economy.column_split import ModelShape
from betoken.common.economy.pipeline import PipelineStages, layers_of_stages
from betoken.common.errors import InvalidArgumentError
from betoken.engine.ranks.stages import stage_layers
from tests.engine.rank_threads import joined

SHAPE = ModelShape(num_layers=28, hidden_size=1536, attention_size=1536, intermediate_size=8960, vocab_size=151936)
STAGES = PipelineStages(SHAPE, 2, 2, 1.25, 100, 40, 8)


def scheduled_step_ms(stages: PipelineStages, num_steps: int = 400) -> float:
    """Time of a step in the long run: each stage computes micro-batches in the order of their arrival."""
    free = [0.0] * stages.pipeline
    ready, times = [0.0] * stages.micro_batches, stages.stage_ms
    ends = []
    for _ in range(num_steps):
        for number in range(stages.micro_batches):
            now = ready[number]
            for stage, duration in enumerate(times):
                now = free[stage] = max(now, free[stage]) + duration
                now += stages.link_ms if stage < stages.pipeline - 1 else stages.stage_link_us / 1e3
            ready[number] = now
        ends.append(ready[-1])
    return (ends[-1] - ends[num_steps // 2 - 1]) / (num_steps // 2)


@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("link_us", [0, 5000])
def test_a_step_takes_as_long_as_in_the_schedule(pipeline: int, micro_batches: int, link_us: float) -> None:
    stages = replace(STAGES, pipeline=pipeline, micro_batches=min(pipeline, micro_batches), stage_link_us=link_us)
    assert scheduled_step_ms(stages) == pytest.approx(stages.step_ms)
    assert 0 <= stages.idle_share < 1


def test_equal_stages_are_never_idle_if_each_has_a_micro_batch() -> None:
    even = replace(STAGES, shape=replace(SHAPE, vocab_size=1), stage_link_us=0, stage_link_gb_s=1e6)
    assert even.step_ms == pytest.approx(40, rel=1e-3) and even.idle_share == pytest.approx(0, abs=1e-3)
    assert replace(even, micro_batches=1).idle_share == pytest.approx(0.5, abs=1e-3)


def test_the_bubble_of_a_prompt_is_that_of_gpipe() -> None:
    assert replace(STAGES, pipeline=4, micro_batches=4).bubble_share == pytest.approx(3 / 7)
    assert replace(STAGES, pipeline=4, micro_batches=1).bubble_share == pytest.approx(3 / 4)


def test_planned_stages_have_the_layers_of_an_engines_stages() -> None:
    with joined(3, 3) as groups:
        for num_layers in (3, 7, 28):
            counts = [len(stage_layers(group, num_layers)) for group in reversed(groups)]
            assert counts == layers_of_stages(num_layers, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [("pipeline", 1), ("pipeline", 29), ("micro_batches", 3), ("stage_link_gb_s", 0), ("stage_link_us", -1)],
)
def test_stages_outside_their_range_are_rejected(field: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=field):
        replace(STAGES, **{field: value})
