"""The plug-in of `examples/` equals the one on the drafters page; `tests/drafters` hosts it."""

import re
from pathlib import Path

import pytest

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.plugin import load_plugin
from betoken.engine.sampling import SamplingParams

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "phrase_drafter.py"


def test_the_page_shows_the_example():
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "drafters.md").read_text(), re.DOTALL)
    assert shown == EXAMPLE.read_text()


@pytest.mark.parametrize(("ids", "expected"), [([7, 11, 12], [13, 14]), ([7, 11, 12, 20], [21]), ([11], [])])
def test_the_phrase_drafter_proposes_the_rest_of_a_phrase(ids, expected, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    drafter = load_plugin("phrase_drafter:PhraseDrafter")
    sequence = DraftSequence((1, 1), SamplingParams(), ids, [], 100)
    drafter.open(sequence)
    drafter.request(sequence, 2)
    (drafted,) = drafter.step()
    assert drafted.draft_ids == expected
