"""When an ended service is restarted, and when it is given up, with a fake clock."""

import pytest

from betoken.cli.service_process import ServiceFailedError
from betoken.cli.supervision import MAX_ENDS, STEADY_S, Supervisor


class FakeProcess:
    """Serves as soon as it is started, until a test ends it."""

    was_stopped = False

    def __init__(self, name: str) -> None:
        self.name, self.pid, self.is_up = name, 1, True

    def start(self) -> None:
        self.pid, self.is_up = self.pid + 1, True

    def is_ready(self) -> bool:
        if not self.is_up:
            raise ServiceFailedError(self.name, "ended", "")
        return True


class Scene:
    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.processes = {name: FakeProcess(name) for name in names}
        self.told: list[str] = []
        self.faults: list[str] = []
        self.supervisor = Supervisor(
            self.processes, self.told.append, lambda error: self.faults.append(error.name), lambda: self.now_s
        )

    def end(self, name: str) -> bool:
        self.processes[name].is_up = False
        return self.supervisor.step()

    def wait(self, seconds: float) -> bool:
        self.now_s += seconds
        self.supervisor.step()
        return self.supervisor.step()  # a service started by the first serves by the second


@pytest.mark.parametrize("name", ["draft", "verify-1", "verify-2", "router"])
def test_an_ended_service_is_reported_once_and_restarted_after_a_pause(name: str) -> None:
    scene = Scene("verify-1", "verify-2", "draft", "router")
    assert scene.end(name) and scene.wait(0.9)
    assert not scene.processes[name].is_up and scene.faults == [name]
    assert scene.wait(0.2) and scene.processes[name].is_up
    assert scene.told == [f"{name} is started again in 1 s", f"{name} serves again, pid 2"]


def test_the_restart_pause_grows_with_ends_in_a_row_and_resets_for_a_steady_service() -> None:
    scene = Scene("verify", "draft", "router")
    for pause_s in (1, 2, 4):
        scene.end("draft")
        assert scene.told[-1] == f"draft is started again in {pause_s} s"
        scene.wait(pause_s)
    scene.wait(STEADY_S)
    scene.end("draft")
    assert scene.told[-1] == "draft is started again in 1 s"


@pytest.mark.parametrize(("name", "goes_on"), [("draft", True), ("verify", False), ("router", False)])
def test_a_service_that_keeps_ending_is_given_up_with_its_dependents(name: str, goes_on: bool) -> None:
    scene = Scene("verify", "draft", "router")
    for _ in range(MAX_ENDS - 1):
        assert scene.end(name) and scene.wait(60)
    assert scene.end(name) is goes_on
    assert scene.told[-1] == f"{name} has ended {MAX_ENDS} times in a row: it is not started again"
    assert scene.wait(1000) is goes_on and scene.faults == [name] * MAX_ENDS


def test_one_of_several_verify_workers_is_enough() -> None:
    scene = Scene("verify-1", "verify-2", "router")
    for name, goes_on in (("verify-1", True), ("verify-2", False)):
        scene.processes[name].was_stopped = True
        assert scene.end(name) is goes_on
        assert scene.told[-1] == f"{name} was stopped: it is not started again"
