"""Local processes, with tiny services in place of the real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from betoken.cli import local_services
from betoken.cli.local_services import LocalServices, LocalServicesConfig
from betoken.cli.service_process import Progress, ServiceFailedError, ServiceProcess
from betoken.client import Client, UnavailableError
from betoken.router.settings import RouterSettings
from tests.pipes import line_of


@pytest.fixture
def services(fake_modules: Path) -> Iterator[LocalServices]:
    logs = fake_modules / "logs"
    services = LocalServices(LocalServicesConfig("target-dir", "draft-dir", log_directory=logs, verify_threads=2))
    with services:
        yield services


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def options_of(services: LocalServices, name: str) -> dict[str, str]:
    line = services.services[name].log_file.read_text().splitlines()[-1]
    return json.loads(line.removeprefix("options "))


def test_three_services_are_connected_and_stop(services: LocalServices) -> None:
    with Client(services.address) as client:
        info = client.model_info()
    assert info.model == "fake"
    assert info.verify_workers[0].address == services.services["verify"].address
    assert info.draft_workers[0].address == services.services["draft"].address
    assert options_of(services, "verify")["model"] == "target-dir"
    assert options_of(services, "verify")["threads"] == "2"
    assert options_of(services, "draft")["model"] == "draft-dir"
    assert options_of(services, "router")["tokenizer"] == "target-dir"
    pids = [service.pid for service in services.services.values()]
    services.stop()
    assert not any(map(is_alive, pids))
    services.stop()


def test_a_model_named_for_workers_in_the_environment_is_not_the_router_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BETOKEN_MODEL", "models/target")
    services = LocalServices(LocalServicesConfig("models/target"))
    arguments = services._router_arguments([], [])
    assert RouterSettings.parse([*arguments, "--verify", "a:1"]).model == ""
    services = LocalServices(LocalServicesConfig("models/target", router_options=["--model", "target"]))
    arguments = services._router_arguments([], [])
    assert RouterSettings.parse([*arguments, "--verify", "a:1"]).model == "target"


def test_drafters_named_in_the_environment_are_not_these_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BETOKEN_DRAFT", "elsewhere:50053")
    arguments = LocalServices(LocalServicesConfig("models/target", drafters=()))._router_arguments([], [])
    assert RouterSettings.parse([*arguments, "--verify", "a:1"]).draft == ()


def test_a_killed_service_is_noticed_and_starts_again_on_its_port(services: LocalServices) -> None:
    address = services.services["draft"].address
    services.kill("draft")
    with pytest.raises(ServiceFailedError, match="draft was ended by SIGKILL"):
        services.check()
    services.restart("draft")
    services.check()
    assert services.services["draft"].address == address


def test_services_that_ended_together_restart_one_by_one(services: LocalServices) -> None:
    for name in ("verify", "draft"):
        services.kill(name)
    for name in ("verify", "draft"):
        services.restart(name)
    services.check()


def test_the_last_words_are_of_the_last_start_only(services: LocalServices) -> None:
    draft = services.services["draft"]
    services.kill("draft")
    draft.log_file.write_text("of an earlier run\n")
    services.restart("draft")
    assert draft.log_tail().startswith("options ")
    assert draft.log_file.read_text().startswith("of an earlier run\noptions ")


def test_a_service_that_ended_long_ago_is_not_signalled_again(
    services: LocalServices, monkeypatch: pytest.MonkeyPatch
) -> None:
    signalled: list[int] = []
    draft, killpg = services.services["draft"], os.killpg
    monkeypatch.setattr(os, "killpg", lambda group, number: (signalled.append(group), killpg(group, number)))
    os.kill(draft.pid, signal.SIGKILL)
    assert draft.wait(30)
    with pytest.raises(ServiceFailedError, match="^draft "):
        draft.check()
    assert signalled == [draft.pid]  # what it may have started
    services.stop()
    assert signalled.count(draft.pid) == 1  # by now that may be another's number


def test_workers_end_by_themselves_after_a_router_that_had_to_be_killed(fake_modules: Path) -> None:
    config = LocalServicesConfig(
        "target-dir",
        "draft-dir",
        log_directory=fake_modules / "logs",
        router_options=["--stubborn"],
        verify_options=["--leisurely"],
        draft_options=["--leisurely"],
    )
    with LocalServices(config) as services:
        services.stop(grace_s=4.0)
    for name in ("verify", "draft"):
        assert services.services[name].log_tail().endswith("ended by itself")


def test_a_paused_service_can_still_be_stopped(services: LocalServices) -> None:
    services.services["draft"].pause()
    services.stop(grace_s=0.2)
    assert not services.services["draft"].is_running


def test_progress_is_reported_once_per_change(fake_modules: Path) -> None:
    reported: list[tuple[str, Progress]] = []

    def note(name: str, progress: Progress) -> None:
        reported.append((name, progress))
        if (name, progress.stage) == ("verify", "warming up"):
            (fake_modules / "go").touch()

    config = LocalServicesConfig("t", drafters=(), log_directory=fake_modules, verify_options=["--held"])
    with LocalServices(config, note):
        pass
    assert [progress.stage for name, progress in reported if name == "verify"][-2:] == ["warming up", "serving"]
    assert "draft" not in {name for name, _ in reported}


def test_router_and_gateway_serve_while_a_verify_worker_loads(fake_modules: Path) -> None:
    serving: set[str] = set()

    def note(name: str, progress: Progress) -> None:
        if progress.stage.startswith("serving at "):
            serving.add(name)
        if serving == {"router", "gateway"}:
            (fake_modules / "go").touch()

    config = LocalServicesConfig("t", drafters=(), http_port=0, log_directory=fake_modules, verify_options=["--held"])
    with LocalServices(replace(config, start_timeout_s=30.0), note) as services:
        assert options_of(services, "gateway")["router"] == services.address


def test_several_workers_are_numbered(fake_modules: Path) -> None:
    config = LocalServicesConfig("t", num_verify_workers=2, drafters=("model", "ngram"))
    with LocalServices(config) as services:
        assert list(services.services) == ["verify-1", "verify-2", "draft", "router"]
        with Client(services.address) as client:
            assert len(client.model_info().verify_workers) == 2
        logs = services.services["draft"].log_file
        assert options_of(services, "draft")["drafters"] == "model,ngram"
    assert not logs.exists()


@pytest.mark.parametrize("drafters", [None, ("ngram",), ("staged", "early_exit", "fused")])
@pytest.mark.parametrize(("draft", "lookahead_model"), [("d", ""), ("", "other")])
def test_a_draft_worker_gets_all_models_and_the_requested_drafters(
    fake_modules: Path, drafters: Sequence[str] | None, draft: str, lookahead_model: str
) -> None:
    """The worker decides which model a drafter uses, and which drafters are hosted by default."""
    config = LocalServicesConfig("t", draft, weights={"lookahead_model": lookahead_model}, drafters=drafters)
    with LocalServices(config) as services:
        options = options_of(services, "draft")
    assert options["drafters"] == ",".join(drafters or ())
    assert (options["model"], options["early_exit_model"], options["lookahead_model"]) == (draft, "t", lookahead_model)


def test_a_verify_worker_gets_the_weights_of_drafters_that_it_can_attach(fake_modules: Path) -> None:
    weights = {"lookahead_model": "l", "medusa": "m", "eagle3": "e"}
    with LocalServices(LocalServicesConfig("t", "d", weights=weights, drafters=("ngram",))) as services:
        verify, draft = options_of(services, "verify"), options_of(services, "draft")
    assert (verify["lookahead_model"], verify["medusa"], verify["eagle3"]) == ("", "m", "e")
    assert (draft["lookahead_model"], draft["medusa"], draft["eagle3"]) == ("l", "", "")


def test_a_service_that_cannot_start_is_named_with_its_last_words(fake_modules: Path) -> None:
    services = LocalServices(LocalServicesConfig("t", draft_options=["--fail"]))
    with pytest.raises(ServiceFailedError, match="draft ended with exit status 1(.|\n)*the weights are missing"):
        services.start()
    assert not any(service.is_running for service in services.services.values())


def test_a_router_that_found_no_verify_worker_is_asked_once(
    fake_modules: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The real one takes ten seconds for each answer, the fake one a fifth of that; so is the time after which it is
    # not asked again, and half of it for pauses.
    max_outage_s = local_services._RETRY.max_outage_s / 10
    monkeypatch.setattr(local_services, "_RETRY", replace(local_services._RETRY, max_outage_s=max_outage_s))
    config = LocalServicesConfig("t", drafters=(), log_directory=fake_modules, router_options=["--lonely"])
    with pytest.raises(UnavailableError, match="no verify worker became ready: refused"):
        LocalServices(config).start()
    assert (fake_modules / "router.log").read_text().count("asked") == 1


def test_a_start_that_takes_too_long_fails(fake_modules: Path) -> None:
    with pytest.raises(ServiceFailedError, match=r"no progress for 0.05 s \(starting\)"):
        LocalServices(LocalServicesConfig("t", start_timeout_s=0.05, verify_options=["--idle"])).start()


class Download:
    """A service that fetches a hundredth of its model in as many seconds as reported, by a clock that `sleep` moves."""

    name = "verify"

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._now_s = 0.0

    def monotonic(self) -> float:
        return self._now_s

    def sleep(self, _: float) -> None:
        self._now_s += 1.0

    def is_ready(self) -> bool:
        return self._now_s >= 100 * self._seconds

    def progress(self) -> Progress:
        return Progress("downloading", self._now_s // self._seconds / 100)

    def check(self) -> None:
        pass

    def log_tail(self) -> str:
        return ""


@pytest.mark.parametrize("seconds", [50.0, 70.0])
def test_a_start_may_take_as_long_as_it_goes_forward(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    download = Download(seconds)
    monkeypatch.setattr(local_services, "time", download)
    services = LocalServices(LocalServicesConfig("t", start_timeout_s=60.0))
    if seconds < 60:
        services._wait_until_ready([download])
        assert download.monotonic() >= 5000.0
    else:
        with pytest.raises(ServiceFailedError, match=r"no progress for 60 s \(downloading\)"):
            services._wait_until_ready([download])
        assert download.monotonic() < 62.0


def test_a_service_that_does_not_stop_is_killed(fake_modules: Path) -> None:
    services = LocalServices(LocalServicesConfig("t", verify_options=["--stubborn"]))
    services.start()
    before = time.monotonic()
    services.stop(grace_s=0.3)
    assert time.monotonic() - before < 20
    assert not services.services["verify"].is_running


def test_services_end_when_whoever_started_them_is_killed(fake_modules: Path) -> None:
    code = f"""
import pathlib, time
from betoken.cli.service_process import ServiceProcess
service = ServiceProcess("one", "fake_service", [], directory=pathlib.Path({str(fake_modules)!r}))
service.start()
while not service.is_ready(): time.sleep(0.02)
print(service.pid, flush=True)
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(line_of(parent.stdout))
    assert is_alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait(60)
    deadline = time.monotonic() + 30
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


@pytest.mark.parametrize(
    "host, address",
    [
        ("127.0.0.1", "127.0.0.1:0"),
        ("0.0.0.0", "127.0.0.1:0"),
        ("::", "[::1]:0"),
        ("[::1]", "[::1]:0"),
        ("box", "box:0"),
        ("unix:/run/one.sock", "unix:/run/one.sock"),
    ],
)
def test_an_address_can_be_dialled(tmp_path: Path, host: str, address: str) -> None:
    assert ServiceProcess("one", "none", [], directory=tmp_path, host=host).address == address


def test_only_the_router_listens_at_the_given_host(fake_modules: Path) -> None:
    config = LocalServicesConfig("t", host="0.0.0.0", drafters=(), log_directory=fake_modules)
    with LocalServices(config) as services:
        assert options_of(services, "router")["host"] == "0.0.0.0"
        assert options_of(services, "verify")["host"] == f"unix:{fake_modules}/verify.sock"


@pytest.mark.parametrize("folder", ["x" * 107, "run#1", "run?", "run,1", "run%201"], ids=["too long", *"#?,%"])
def test_workers_get_ports_where_the_path_cannot_be_a_sockets(fake_modules: Path, folder: str) -> None:
    config = LocalServicesConfig("t", drafters=(), log_directory=fake_modules / folder)
    with LocalServices(config) as services:
        assert options_of(services, "verify")["host"] == "127.0.0.1"


def test_a_service_is_started_once(fake_modules: Path) -> None:
    service = ServiceProcess("one", "fake_service", [], directory=fake_modules)
    with pytest.raises(RuntimeError, match="never started"):
        _ = service.pid
    service.start()
    try:
        with pytest.raises(RuntimeError, match="runs already"):
            service.start()
    finally:
        service.kill()
