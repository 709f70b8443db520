"""The simulated link of a synthetic worker delays calls and keeps their order."""

import threading
import time

from betoken.rpc.link.delay_line import delayed


def test_calls_of_a_delay_line_arrive_late_and_in_order() -> None:
    arrived, is_over = [], threading.Event()

    def arrive(number: int) -> None:
        arrived.append((number, time.perf_counter()))
        if number == 4:
            is_over.set()

    call, began_s = delayed(arrive, 0.02), time.perf_counter()
    for number in range(5):
        call(number)
    assert is_over.wait(60)
    assert [number for number, _ in arrived] == [0, 1, 2, 3, 4]
    assert all(time_s - began_s >= 0.02 for _, time_s in arrived)


def test_a_delay_line_without_delay_is_the_function_itself() -> None:
    assert delayed(print, 0.0) is print
