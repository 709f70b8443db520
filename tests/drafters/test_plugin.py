"""A user's drafter: the documented example drafts, and a class that is no drafter stops the worker."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from betoken.common.errors import FailedPreconditionError, InvalidArgumentError
from betoken.draft_worker.commands import Commit, Open
from betoken.draft_worker.core import DraftCore
from betoken.draft_worker.hosting import load_drafters
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.host.making import DrafterMaker
from betoken.drafters.plugin import is_plugin_path, load_plugin
from betoken.engine.sampling import SamplingParams
from tests.draft_worker.harness import RecordingSink, request

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "drafters.md"


@pytest.fixture
def write_module(tmp_path, monkeypatch):
    """Writes an importable module; returns its dotted name."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name, text):
        package = tmp_path / f"package_of_{name}"
        package.mkdir()
        (package / f"{name}.py").write_text(text)
        return f"package_of_{name}.{name}"

    yield write
    for name in [name for name in sys.modules if name.startswith("package_of_")]:
        del sys.modules[name]


def example() -> str:
    return re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


def test_the_api_that_a_plugin_imports_is_typed_when_installed():
    for package in ("drafters", "engine", "rpc", "common", "v1"):  # those of the names in `drafter`
        root = "protos" if package == "v1" else package
        assert (ROOT / root / "betoken" / package / "py.typed").exists()


class Bench:
    def __init__(self, path):
        self.sink = RecordingSink()
        settings = DraftWorkerSettings(drafters=(path,))
        self.core = DraftCore(load_drafters(settings, lambda stage, fraction: None).drafters, [], self.sink, 8)

    def open(self, sequence_id, prompt_ids, **settings):
        params = SamplingParams(temperature=0.0)
        self.core.apply(Open((1, sequence_id), params, tuple(prompt_ids), (), 100, settings=settings))

    def draft(self, sequence_id, num_tokens=8):
        self.sink.answers.clear()
        self.core.apply(request(self.core, sequence_id, num_tokens, time.perf_counter_ns()))
        while self.core.has_work:
            self.core.step()
        return [answer.drafted.draft_ids for answer in self.sink.answers]


def test_the_documented_example_drafts(write_module):
    text = example()
    assert len(text.splitlines()) <= 35
    bench = Bench(f"{write_module('phrases', text)}:PhraseDrafter")
    bench.open(1, [5, 11, 12])
    assert bench.draft(1) == [[13, 14, 15]]
    bench.core.apply(Commit((1, 1), 3, [20]))
    assert bench.draft(1) == [[21]]
    bench.open(2, [11])
    assert bench.draft(2) == [[]]
    bench.open(3, [11], min_match="1")
    assert bench.draft(3, num_tokens=2) == [[12, 13]]
    bench.open(4, [11], minimum="1")
    assert isinstance(bench.sink.failures[(1, 4)], InvalidArgumentError)


def test_a_reloaded_plugin_is_made_again(write_module):
    path = f"{write_module('again', example())}:PhraseDrafter"
    maker = DrafterMaker(DraftWorkerSettings(drafters=(path,)), (path,))
    before = maker.make()
    after = maker.make_again([path])
    assert type(after[path]) is type(before[path]) and after[path] is not before[path]


RAISING = """
from betoken.drafters.drafter import Drafted
from betoken.drafters.immediate import ImmediateDrafter

class Raising(ImmediateDrafter):
    def propose(self, sequence, num_tokens):
        if sequence.ids[-1] == 13:
            raise RuntimeError("not this one")
        return Drafted(sequence, [sequence.ids[-1]] * num_tokens)
"""


def test_a_plugin_that_raises_costs_its_sequence_one_round_and_is_logged(write_module, caplog):
    bench = Bench(f"{write_module('raising', RAISING)}:Raising")
    bench.open(1, [13])
    bench.open(2, [2])
    bench.core.apply(request(bench.core, 2, 2, 0))
    assert sorted(bench.draft(1, 2)) == [[], [2, 2]]
    assert "not this one" in caplog.text
    bench.core.apply(Commit((1, 1), 1, [7]))
    assert bench.draft(1, 2) == [[7, 7]]
    assert not bench.sink.failures


NO_DRAFTERS = """
class Empty: pass
class Half:
    has_work = False
    def open(self, sequence): pass
class NeedsMore:
    has_work = False
    def __init__(self, value): pass
    open = commit = request = close = step = check_integrity = lambda self: None
a_function = lambda: None
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Empty", "is not a Drafter: it lacks has_work, open"),
        ("Half", "is not a Drafter: it lacks commit, request, close, step"),
        ("NeedsMore", "cannot be made without arguments"),
        ("a_function", "is no class"),
        ("Missing", "cannot be imported: AttributeError"),
    ],
)
def test_a_plugin_that_is_not_a_drafter_is_rejected_with_the_reason(write_module, name, reason):
    path = f"{write_module('none', NO_DRAFTERS)}:{name}"
    with pytest.raises(FailedPreconditionError, match=reason) as caught:
        load_plugin(path)
    assert path in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys\nsys.exit(0)", "cannot be imported: SystemExit: 0"),
        (NO_DRAFTERS + "class Quits(NeedsMore):\n    def __init__(self): raise SystemExit", "cannot be made without"),
    ],
    ids=["import", "class"],
)
def test_a_plugin_script_that_exits_is_rejected_and_does_not_end_the_worker_silently(write_module, text, reason):
    with pytest.raises(FailedPreconditionError, match=reason):
        load_plugin(f"{write_module('script', text)}:Quits")


def test_paths_of_plugins_are_distinguished_from_drafter_names():
    assert is_plugin_path("a:B") and is_plugin_path("a.b_c.d:E")
    assert not any(is_plugin_path(name) for name in ("model", "a.b", "a:", ":B", "a..b:C", "a b:C", "a:b.c"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafters", "nonsense"], "--drafters = 'nonsense'"),
        (["--drafters", f"module:{'C' * 250}"], "must be at most 256 bytes"),  # longer than a request can name
        (
            ["--drafters", "no_such_package.module:Class"],
            "--drafters = no_such_package.module:Class: cannot be imported",
        ),
        (["--drafters", "json:JSONDecoder"], "is not a Drafter: it lacks"),
    ],
)
def test_the_worker_does_not_start_with_a_plugin_that_is_not_a_drafter(arguments, message):
    command = [sys.executable, "-m", "betoken.draft_worker", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert message in done.stderr and "Traceback" not in done.stderr
