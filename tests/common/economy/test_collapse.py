"""The alarm of a collapsed acceptance: a recent window against a long one."""

import pytest

from betoken.common.economy.collapse import MIN_PAUSE_ROUNDS, NUM_RECENT, AcceptanceAlarm, has_collapsed


def alarms(alarm: AcceptanceAlarm, num_rounds: int, *accepted: int) -> int:
    """Alarms over rounds of five draft tokens, of which so many are accepted in turn."""
    return sum(alarm.record(5, accepted[number % len(accepted)]) for number in range(num_rounds))


def test_a_drafter_whose_acceptance_collapses_raises_an_alarm() -> None:
    alarm = AcceptanceAlarm()
    assert not alarms(alarm, 200, 5, 2, 3, 0)
    assert alarms(alarm, 2 * NUM_RECENT, 0) == 1


@pytest.mark.parametrize("accepted", [(1,), (0, 1), (0, 0, 2, 0)])
def test_an_acceptance_that_only_falls_raises_no_alarm(accepted: tuple[int, ...]) -> None:
    alarm = AcceptanceAlarm()
    assert not alarms(alarm, 200, 5, 2, 3, 0) and not alarms(alarm, 400, *accepted)


def test_acceptance_alarms_pause_ever_longer_and_never_end() -> None:
    alarm = AcceptanceAlarm()
    alarms(alarm, 200, 5, 2, 3, 0)
    assert [alarms(alarm, MIN_PAUSE_ROUNDS, 0) for _ in range(7)] == [1, 1, 0, 1, 0, 0, 0]
    assert alarms(alarm, 40 * MIN_PAUSE_ROUNDS, 0) >= 2


def test_a_recovered_acceptance_is_watched_as_before() -> None:
    alarm = AcceptanceAlarm()
    alarms(alarm, 200, 5, 2, 3, 0)
    for _ in range(3):
        assert alarms(alarm, MIN_PAUSE_ROUNDS, 0) == 1
        assert not alarms(alarm, MIN_PAUSE_ROUNDS + NUM_RECENT, 5, 2, 3, 0)


def test_a_new_drafter_with_low_acceptance_raises_no_alarm() -> None:
    assert not alarms(AcceptanceAlarm(), 2000, 0)


@pytest.mark.parametrize(
    ("accepted", "examined", "long", "expected"),
    [(0, 0, 0.5, False), (0, 32, 0.0, False), (0, 32, 1.0, True), (0, 4, 0.5, False), (0, 32, 0.5, True)],
)
def test_the_test_for_a_collapse_needs_evidence(accepted: int, examined: int, long: float, expected: bool) -> None:
    assert has_collapsed(accepted, examined, long) is expected
