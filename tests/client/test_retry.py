"""The waits between attempts, on a clock that advances only on request."""

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from betoken.client import (
    DeadlineExceededError,
    InternalError,
    InvalidArgumentError,
    LoadingError,
    ResourceExhaustedError,
    RetryPolicy,
    UnavailableError,
)
from betoken.client.retry import Retries


def highest(low: float, high: float) -> float:
    assert low == high / 2
    return high


def at(times: list[float]) -> Callable[[], float]:
    return lambda: times[0]


def test_retry_waits_double_up_to_the_bound_and_start_anew_after_progress() -> None:
    policy = RetryPolicy(max_retries=4, initial_backoff_s=1, max_backoff_s=3)
    retries = Retries(policy, None, at([0.0]), highest)
    error = UnavailableError("gone")
    assert [retries.delay_after(error) for _ in range(4)] == [1, 2, 3, 3]
    with pytest.raises(UnavailableError, match="gone") as caught:
        retries.delay_after(error)
    assert caught.value is error
    retries.progressed()
    assert retries.delay_after(error) == 1


def test_an_outage_is_waited_out_no_longer_than_wanted() -> None:
    times = [0.0]
    retries = Retries(RetryPolicy(max_outage_s=10), None, at(times))
    times[0] = 9.0
    retries.delay_after(UnavailableError("gone"))
    retries.progressed()
    times[0] = 18.0
    retries.delay_after(UnavailableError("gone"))
    times[0] = 19.0
    with pytest.raises(UnavailableError, match="gone"):
        retries.delay_after(UnavailableError("gone"))


def test_a_router_that_is_absent_is_sought_as_long_as_the_policy_says_and_the_deadline_leaves() -> None:
    for policy, timeout_s, given_up_s in (
        (RetryPolicy(), None, 60.0),
        (RetryPolicy(max_failing_s=300.0), None, 300.0),
        (RetryPolicy(max_failing_s=math.inf), 600.0, 600.0),
        (RetryPolicy(), 20.0, 20.0),
    ):
        times = [100.0]
        retries = Retries(policy, timeout_s, at(times), highest)
        times[0] = began = 100.0 + (90.0 if timeout_s is None else 0.0)  # a long prompt came first: no failure
        with pytest.raises(UnavailableError, match="gone") as caught:
            while True:
                times[0] += retries.delay_after(UnavailableError("gone"))
        assert given_up_s - policy.max_backoff_s <= times[0] - began <= given_up_s + policy.max_backoff_s
        notes = " ".join(getattr(caught.value, "__notes__", ()))
        assert ("max_failing_s" in notes) == (timeout_s is None)


def test_an_error_that_a_retry_cannot_fix_is_raised() -> None:
    with pytest.raises(InternalError, match="bug"):
        Retries(RetryPolicy(), None).delay_after(InternalError("bug"))


def test_an_overloaded_router_is_left_alone_as_long_as_it_asks() -> None:
    error = ResourceExhaustedError("full", retry_after_s=9.0)
    assert Retries(RetryPolicy(retry_when_exhausted=True), None).delay_after(error) == 9.0
    with pytest.raises(ResourceExhaustedError, match="full"):
        Retries(RetryPolicy(), None).delay_after(error)


def test_a_loading_model_is_waited_for_unless_the_policy_declines() -> None:
    error = LoadingError("packing weights", 0.43)
    assert Retries(RetryPolicy(), None).delay_after(error) > 0
    with pytest.raises(LoadingError, match=r"the model is loading: packing weights \(43%\)"):
        Retries(RetryPolicy(retry_while_loading=False), None).delay_after(error)


def test_an_infinite_deadline_is_none() -> None:
    assert Retries(RetryPolicy(), float("inf")).remaining_s() is None


def test_no_retry_wait_exceeds_the_deadline() -> None:
    times = [100.0]
    retries = Retries(RetryPolicy(initial_backoff_s=1), 2.0, at(times), highest)
    assert retries.remaining_s() == 2.0 and retries.delay_after(UnavailableError("gone")) == 1
    with pytest.raises(UnavailableError, match="gone"):
        retries.delay_after(UnavailableError("gone"))
    times[0] = 102.0
    with pytest.raises(DeadlineExceededError, match="the deadline passed"):
        retries.remaining_s()


def test_a_retry_policy_without_a_bound_outlives_any_number_of_retries() -> None:
    retries = Retries(RetryPolicy(max_retries=10**6, max_backoff_s=2.0), None, uniform=lambda low, high: high)
    assert [retries.delay_after(UnavailableError("gone")) for _ in range(2000)][-1] == 2.0


@pytest.mark.parametrize("value", [-1, math.nan, "3", None])
@pytest.mark.parametrize("name", ["max_retries", "max_failing_s", "initial_backoff_s", "max_backoff_s"])
def test_a_bad_retry_policy_is_rejected(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value!r}, must be a number"):
        RetryPolicy(**{name: value})


def test_a_deadline_of_numpy_is_a_number_of_python() -> None:
    """A time of day and a float32 add up to a minute more or less."""
    assert type(Retries(RetryPolicy(), np.float32(0.5)).remaining_s()) is float


@pytest.mark.parametrize(
    "timeout_s", [None, math.inf, 1e10, 1e300, sys.maxsize, 10**400], ids=lambda value: type(value).__name__
)
def test_a_deadline_beyond_all_clocks_is_none(timeout_s: Any) -> None:
    assert Retries(RetryPolicy(), timeout_s).remaining_s() is None


@pytest.mark.parametrize("timeout_s", ["x", math.nan])
def test_a_deadline_that_is_no_number_is_refused_by_name(timeout_s: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^timeout_s = "):
        Retries(RetryPolicy(), timeout_s)
