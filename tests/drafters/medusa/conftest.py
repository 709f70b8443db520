"""A tiny target with features."""

import pytest

from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from tests.engine.tiny import save_tiny


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    """A random llama of width 64 and 101 ids, called `target`."""
    saved = save_tiny(tmp_path_factory.mktemp("medusa") / "target", "llama")
    config = EngineConfig(saved, dtype="float32", num_pages=64, compile="off", feature_layers=lambda n: (n,))
    return load_runner(config)
