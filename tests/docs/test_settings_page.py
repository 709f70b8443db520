"""The settings page says what the settings classes say."""

import runpy
from pathlib import Path

import pytest

from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.gateway.settings import GatewaySettings
from betoken.router.settings import RouterSettings
from betoken.verify_worker.settings import VerifyWorkerSettings

DOCS = Path(__file__).parents[2] / "docs"


def test_the_settings_page_equals_the_settings_classes() -> None:
    render = runpy.run_path(str(DOCS / "generate_settings.py"))["render"]
    assert (DOCS / "settings.md").read_text() == render(), "run `make docs`"


@pytest.mark.parametrize("settings", [RouterSettings, VerifyWorkerSettings, DraftWorkerSettings, GatewaySettings])
def test_a_service_has_at_most_35_options_besides_shared_ones(settings: type) -> None:
    num_own, num_of_drafters = runpy.run_path(str(DOCS / "generate_settings.py"))["num_options"](settings)
    assert num_own + num_of_drafters <= 35, (num_own, num_of_drafters)
