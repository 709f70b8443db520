"""A verification step over a real model with recurrent states: which tokens its segments commit."""

from typing import Any

import pytest

from betoken.engine.batch import Segment
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from tests.engine.tiny import save_tiny
from tests.verify_worker.harness import Bench

PROMPT = list(range(10, 30))
"""Longer than the prefill chunk of `Bench`."""


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = save_tiny(tmp_path_factory.mktemp("target"), "qwen3_next")
    return load_runner(EngineConfig(path, dtype="float32", num_pages=64, page_size=4, compile="off"))


def greedy(runner: Any, num_tokens: int) -> list[int]:
    """Most likely ids after the prompt, each from one forward over the whole text."""
    ids = list(PROMPT)
    for _ in range(num_tokens):
        page_ids, _ = runner.page_table.allocate(ids)
        ids.append(int(runner.forward([Segment(page_ids, 0, ids, 1)]).logits.argmax()))
        runner.page_table.release(page_ids)
    return ids[len(PROMPT) :]


def test_a_decode_of_a_recurrent_model_equals_forwards_over_the_whole_text(runner: Any) -> None:
    truth, bench = greedy(runner, 8), Bench(runner)
    bench.open(1, PROMPT)
    bench.grant(1, len(PROMPT), 8)
    bench.run()
    assert not bench.sink.failures
    assert bench.emitted(1, {}) == truth
    bench.close(1)


def test_a_rejected_draft_is_not_committed_to_the_state(runner: Any) -> None:
    truth, bench = greedy(runner, 4), Bench(runner)
    draft = [truth[0], (truth[1] + 1) % 90, truth[2]]
    bench.open(1, PROMPT)
    bench.block(1, len(PROMPT), draft)
    bench.run()
    bench.grant(1, len(PROMPT) + 2, 2)
    bench.run()
    assert not bench.sink.failures
    assert bench.emitted(1, {len(PROMPT): draft}) == truth
    bench.close(1)


def test_optional_fields_of_a_segment_are_passed_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Segment([0], 0, [1], 1, None, 3)  # type: ignore[misc]
