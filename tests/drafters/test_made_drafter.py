"""A drafter that is made here and entered in the registry appears wherever drafters do; nothing else names it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from betoken.common.errors import InvalidArgumentError
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.drafter import DraftSequence
from betoken.drafters.host.host import DrafterHost
from betoken.drafters.host.hosted import Request
from betoken.drafters.host.making import DrafterMaker
from betoken.drafters.registry import SPECS
from betoken.engine.sampling import SamplingParams
from tests.drafters.made_drafter import SPEC

ROOT = Path(__file__).parents[2]


def printed_with_it(program: str) -> str:
    """Standard output of a program that runs after the drafter was entered in the registry."""
    enter = "from betoken.drafters.registry import SPECS; from tests.drafters.made_drafter import SPEC; "
    program = f"{enter}SPECS[SPEC.name] = SPEC\n{program}"
    environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PATH": "", "COLUMNS": "200"}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_made_drafter_has_its_options_in_both_workers_settings() -> None:
    told = printed_with_it(
        "import json\n"
        "from betoken.draft_worker.settings import DraftWorkerSettings as Draft\n"
        "from betoken.verify_worker.settings import VerifyWorkerSettings as Verify\n"
        "draft = Draft(drafters=('made',), made_step=3)\n"
        "verify = Verify(model='t', attached_drafters=('made',), made_weights='w')\n"
        "print(json.dumps([draft.made_step, verify.made_step, str(verify.made_weights)]))"
    )
    assert json.loads(told) == [3, 1, "w"]


def test_a_made_drafter_has_its_options_in_up_and_on_the_pages_of_docs() -> None:
    told = printed_with_it(
        "import runpy\n"
        "commands, settings = (runpy.run_path(f'docs/generate_{page}.py') for page in ('commands', 'settings'))\n"
        "up = commands['render']().partition('## betoken up')[2].partition('## betoken ')[0]\n"
        "print(up, '#####', settings['render']())"
    )
    up, _, settings = told.partition("#####")
    assert "| `--made-weights` | `BETOKEN_MADE_WEIGHTS` | – | Weights of `made`. |" in up and "--made-step" not in up
    assert settings.count("| `--made-step` | `BETOKEN_MADE_STEP` | `1` | Step of `made`. (≥ 1, ≤ 9) |") == 2
    assert settings.count("`--made-weights`") == 2


def test_a_made_drafter_is_known_to_benchmarks() -> None:
    told = printed_with_it(
        "from betoken.bench.drafter_names import ATTACHABLE, drafter_named\n"
        "from betoken.bench.drafters_options import parse_options\n"
        "pair = ['--target', 't', '--draft', 'd', '--prompts', 'p']\n"
        "options = parse_options([*pair, '--drafters', 'made@attached', '--made-weights', 'w'])\n"
        "print(drafter_named('made@attached'), options.services(options.variants[-1]).verify_options[-2:])"
    )
    assert told == "('made', True) ['--made-weights', 'w']\n"


def test_a_made_drafter_is_hosted_with_its_options_and_a_requests_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SPECS, SPEC.name, SPEC)
    settings = DraftWorkerSettings(drafters=("made",)).model_copy(update={"made_step": 3})
    drafters = DrafterMaker(settings, settings.hosted_drafters).make()
    answers = []

    class Sink:
        def drafted(self, finished):
            answers.extend(answer.drafted.draft_ids for answer in finished)

        def lost(self, hosted):
            raise AssertionError("lost")

    host = DrafterHost(drafters, Sink())
    for n, own in enumerate(({}, {"step": "2"})):
        sequence = DraftSequence((1, n), SamplingParams(), [1], [], 100, settings=own)
        host.request(host.open(sequence, "made"), Request(2, 2))
    host.step()
    assert answers == [[4, 7], [3, 5]]
    refused = DraftSequence((1, 2), SamplingParams(), [1], [], 100, settings={"step": "10"})
    with pytest.raises(InvalidArgumentError, match="drafter.settings.step = 10: must be an integer from 1 to 9"):
        host.open(refused, "made")
