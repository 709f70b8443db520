"""The command `betoken train`."""

import importlib

import pytest

from betoken.training.__main__ import main


def test_an_interrupt_during_the_imports_of_a_recipe_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(importlib, "import_module", interrupted)
    with pytest.raises(SystemExit, match="130"):
        main(["medusa"])
