"""The models page says what the tests' tiny checkpoints show."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_models_page_equals_the_tiny_checkpoints() -> None:
    generator = runpy.run_path(str(DOCS / "generate_models.py"))
    assert (DOCS / "models.md").read_text() == generator["render"](), "run `make docs`"
