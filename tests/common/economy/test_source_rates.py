"""The source of a sequence, chosen from recorded times per token and without a clock."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import pytest

from betoken.common.economy.source_rates import Candidate, SequenceRates, SourceRates

ONE_STREAM = {"fused": 0.0713, "model": 0.0965, "ngram": 0.0819, None: 0.1090}
"""Recorded seconds per token of Qwen2.5-Coder 1.5B with 0.5B on two cores, one stream; None = without drafts."""
SIXTEEN_STREAMS = {"fused": 0.52, "model": 0.56, "ngram": 0.37, None: 0.41}
STEP_TOKENS = 2


def generate(
    sequence: SequenceRates[str],
    num_tokens: int,
    times: Mapping[str | None, float] = ONE_STREAM,
    *,
    level: int = 0,
    off: tuple[str, ...] = (),
    missing: Mapping[str, int] | None = None,
    trial_loss: float = 0.0,
) -> Counter[str]:
    """Decode, and return the tokens by source; those in `off` do not pay, so that they draft in trials only."""
    names = [name for name in times if name is not None]
    candidates = {name: Candidate((missing or {}).get(name, 0), name not in off, lambda: trial_loss) for name in names}
    tokens: Counter[str] = Counter()
    for _ in range(num_tokens // STEP_TOKENS):
        if sequence.is_due:
            sequence.choose(candidates, level)
        source = sequence.current
        assert source is not None
        drafting = None if source in off and sequence.base is None else source
        sequence.add(drafting, level, STEP_TOKENS, STEP_TOKENS * times[drafting])
        sequence.add_tokens(STEP_TOKENS)
        tokens[source] += STEP_TOKENS
    return tokens


def test_the_first_sequence_starts_with_the_preferred_source() -> None:
    rates: SourceRates[str] = SourceRates()
    assert rates.open().choose({"model": Candidate(), "ngram": Candidate()}, 0) == "model"


@pytest.mark.parametrize(("times", "level"), [(ONE_STREAM, 0), (SIXTEEN_STREAMS, 4)])
def test_sequences_come_to_use_the_fastest_source(times: Mapping[str | None, float], level: int) -> None:
    rates: SourceRates[str] = SourceRates()
    fastest = min((name for name in times if name), key=lambda name: times[name])
    for _ in range(20):
        generate(rates.open(), 96, times, level=level)
    assert generate(rates.open(), 96, times, level=level)[fastest] == 96


def test_a_sequence_changes_its_source_when_another_becomes_faster() -> None:
    sequence: SequenceRates[str] = SourceRates[str]().open()
    assert generate(sequence, 4000).most_common(1)[0][0] == "fused"
    repeating = ONE_STREAM | {"ngram": 0.03}
    generate(sequence, 4000, repeating)
    assert generate(sequence, 1000, repeating)["ngram"] > 800


def test_trials_of_slower_sources_cost_a_bounded_share_of_the_time() -> None:
    sequence: SequenceRates[str] = SourceRates[str]().open()
    generate(sequence, 2000)
    tokens = generate(sequence, 40_000)
    seconds = sum(num * ONE_STREAM[name] for name, num in tokens.items())
    assert 1.0 < seconds / (40_000 * ONE_STREAM["fused"]) < 1.03
    assert all(tokens.values()), "each is tried again"


def test_a_sequence_keeps_its_source_between_two_changes() -> None:
    sequence: SequenceRates[str] = SourceRates[str]().open()
    candidates = {name: Candidate() for name in ("fused", "model", "ngram")}
    sources = []
    for step in range(3000):
        if sequence.is_due:
            sequence.choose(candidates, 0)
        assert sequence.current is not None
        sequence.add(sequence.current, 0, 1, 0.1 * (1.0 + 0.5 * math.sin(step / 7)))
        sequence.add_tokens(1)
        sources.append(sequence.current)
    changes = [0, *(i for i in range(1, 3000) if sources[i] != sources[i - 1]), 3000]
    assert min(after - before for before, after in zip(changes, changes[1:], strict=False)) >= 64


def test_a_source_whose_drafts_do_not_pay_counts_as_decoding_without_drafts() -> None:
    times = {"model": 0.13, "ngram": 0.10, None: 0.11}
    rates: SourceRates[str] = SourceRates()
    for _ in range(10):
        generate(rates.open(), 200, times, off=("model",))
    assert generate(rates.open(), 200, times, off=("model",))["ngram"] == 200


def test_evidence_of_an_unused_source_moves_to_the_fastest_so_that_it_is_tried_again() -> None:
    rates: SourceRates[str] = SourceRates()
    for name, token_s in (("model", 0.1), ("ngram", 0.4)):
        rates.add(name, 0, 64, 64 * token_s)
    before = rates.token_s("ngram", 0)
    for _ in range(1000):
        rates.add("model", 0, 16, 1.6)
    after = rates.token_s("ngram", 0)
    assert before is not None and after is not None
    assert before > 0.35 and after < 0.15


def test_a_source_measured_at_another_load_keeps_its_ratio() -> None:
    rates: SourceRates[str] = SourceRates()
    for name, token_s in (("model", 0.1), ("ngram", 0.2)):
        rates.add(name, 0, 4000, 4000 * token_s)
    rates.add("model", 4, 4000, 4000 * 0.5)
    assert rates.token_s("ngram", 4) == pytest.approx(1.0, rel=0.01)
    assert rates.token_s("fused", 4) is None


def test_a_long_prompt_delays_the_first_trial_of_a_source_that_has_to_compute_it() -> None:
    times = {"ngram": 0.08, "model": 0.05, None: 0.11}
    short, long = (generate(SourceRates[str]().open(), 2000, times, missing={"model": num}) for num in (0, 4000))
    assert short["model"] > 1000 and not long["model"]


def test_a_lost_source_is_left_at_once() -> None:
    sequence: SequenceRates[str] = SourceRates[str]().open()
    generate(sequence, 500)
    assert sequence.choose({"ngram": Candidate()}, 0) == "ngram"
    assert sequence.choose({}, 0) is None and sequence.is_due


def test_a_pause_of_the_machine_does_not_count_against_a_source() -> None:
    rates: SourceRates[str] = SourceRates()
    rates.add("model", 0, 100, 10.0)
    rates.add("model", 0, 1, 3600.0)
    assert rates.token_s("model", 0) == pytest.approx(0.13, rel=0.05)


def test_a_source_whose_trial_costs_other_sequences_much_is_tried_late() -> None:
    rates: SourceRates[str] = SourceRates()
    tokens = [generate(rates.open(), 96, SIXTEEN_STREAMS, level=4, trial_loss=2.0) for _ in range(60)]
    assert sum(tokens[:60], Counter()).keys() == {"fused"}
    for _ in range(80):
        tokens.append(generate(rates.open(), 96, SIXTEEN_STREAMS, level=4, trial_loss=2.0))
    assert sum(tokens, Counter()).keys() > {"fused"}
