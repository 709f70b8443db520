"""The verify core that most tests use."""

import pytest

from tests.verify_worker.harness import Bench


@pytest.fixture
def bench(fake_runner_class):
    return Bench(fake_runner_class())
