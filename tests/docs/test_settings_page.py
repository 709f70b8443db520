"""The settings page says what the settings classes say."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_page_is_what_the_settings_classes_say() -> None:
    render = runpy.run_path(str(DOCS / "generate_settings.py"))["render"]
    assert (DOCS / "settings.md").read_text() == render(), "run `make docs`"
