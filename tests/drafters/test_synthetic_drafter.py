"""The synthetic drafter: acceptance and hits are drawn per position, independent of batches."""

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.common.synthetic import SimulatedTimes, next_id
from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.synthetic.drafter import SyntheticDrafter
from betoken.drafters.synthetic.settings import SyntheticSettings
from betoken.engine.sampling import SamplingParams


def sequence(number: int = 1, num_outcomes: int = 0, **settings: str) -> DraftSequence:
    params = SamplingParams(seed=number, ignore_eos=True)
    made = DraftSequence((1, number), params, [3, 4, number], [], 100_000, settings=settings)
    made.num_outcomes = num_outcomes
    return made


def commit_of(drafter: SyntheticDrafter, each: Drafted) -> int:
    """Commit what the target decides about a draft; return the number of accepted tokens."""
    ids: list[int] = []
    for draft_id in [*each.draft_ids, -1]:
        ids.append(next_id(len(each.sequence.ids) + len(ids), (ids or each.sequence.ids)[-1], ()))
        if ids[-1] != draft_id:
            break
    each.sequence.commit(ids)
    drafter.commit(each.sequence, ids)
    return len(ids) - 1


def rounds(drafter: SyntheticDrafter, sequences: list[DraftSequence], num_rounds: int, is_ahead: bool = False) -> dict:
    """Accepted tokens and `num_ahead_ids` of each round, by sequence."""
    results: dict = {one.key[1]: [] for one in sequences}
    for _ in range(num_rounds):
        for one in sequences:
            drafter.request(one, 4)
        drafted = []
        while drafter.has_work:
            drafted += drafter.step()
        while is_ahead and drafter.has_ahead_work:
            drafter.step_ahead()
        for each in drafted:
            num_accepted = commit_of(drafter, each)
            results[each.sequence.key[1]].append((num_accepted, each.num_ahead_ids, each.num_forwards))
    return results


def test_acceptance_of_synthetic_drafts_is_the_given_one_by_position() -> None:
    drafter, one = SyntheticDrafter(SimulatedTimes.parse("0"), SyntheticSettings("0.9,0.5,0")), sequence()
    drafter.open(one)
    accepted = [num for num, *_ in rounds(drafter, [one], 4000)[1]]
    assert sum(num > 0 for num in accepted) / 4000 == pytest.approx(0.9, abs=0.02)
    assert sum(num > 1 for num in accepted) / sum(num > 0 for num in accepted) == pytest.approx(0.5, abs=0.03)
    assert max(accepted) == 2


def test_synthetic_drafts_do_not_depend_on_the_batch() -> None:
    alone, together = SyntheticDrafter(SimulatedTimes.parse("0")), SyntheticDrafter(SimulatedTimes.parse("0"))
    ones, others = [sequence(1)], [sequence(1), sequence(2), sequence(3)]
    for drafter, sequences in ((alone, ones), (together, others)):
        for each in sequences:
            drafter.open(each)
    assert rounds(alone, ones, 50)[1] == rounds(together, others, 50)[1]
    assert ones[0].ids == others[0].ids


@pytest.mark.parametrize("hit_rate", ["0", "0.7", "1"])
def test_hits_of_synthetic_drafts_ahead_have_the_given_rate(hit_rate: str) -> None:
    drafter, one = SyntheticDrafter(SimulatedTimes.parse("0")), sequence(1, 3, hit_rate=hit_rate)
    drafter.open(one)
    (_, first, _), *later = rounds(drafter, [one], 2000, is_ahead=True)[1]
    assert first is None and {num_ahead for _, num_ahead, _ in later} <= {0, 4}
    assert sum(num_ahead == 4 for _, num_ahead, _ in later) / len(later) == pytest.approx(float(hit_rate), abs=0.04)
    assert {(num_ahead, num_forwards) for _, num_ahead, num_forwards in later} <= {(0, 9), (4, 5)}


def test_a_synthetic_hit_is_pushed_with_the_key_of_the_actual_outcome() -> None:
    drafter, one = SyntheticDrafter(SimulatedTimes.parse("0")), sequence(1, 3, hit_rate="0.5")
    drafter.open(one)
    num_hits = 0
    for _ in range(200):
        rounds(drafter, [one], 1)
        drafter.request(one, 4)
        while not (drafted := drafter.step()):
            pass
        pushed = []
        while drafter.has_ahead_work:
            pushed += drafter.step_ahead()
        hits = {each.key: each.draft_ids for each in pushed}
        commit_of(drafter, drafted[0])
        drafter.request(one, 4)
        while not (answered := drafter.step()):
            pass
        is_hit = answered[0].num_ahead_ids == 4
        assert hits == ({(len(one.ids), one.ids[-1]): answered[0].draft_ids} if is_hit else {})
        num_hits += is_hit
        commit_of(drafter, answered[0])
    assert 60 < num_hits < 140


def test_unknown_settings_of_synthetic_drafts_are_rejected() -> None:
    drafter = SyntheticDrafter(SimulatedTimes.parse("0"))
    for settings, field in (({"acceptance": "2"}, "acceptance"), ({"hit_rate": "x"}, "hit_rate"), ({"a": "1"}, "")):
        with pytest.raises(InvalidArgumentError, match=f"drafter.settings.?{field}"):
            drafter.open(sequence(**settings))
