"""Loads the model that an option of a worker names."""

from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.checkpoint import Progress


def load_model(settings: Any, option: str, config: EngineConfig, progress: Progress) -> ModelRunner:
    """Load the model that `option` of the settings names.

    Raises:
        FailedPreconditionError: it cannot be served; the text names the option.
    """
    model: str = getattr(settings, option)
    try:
        return load_runner(config, progress)
    except ModelRefusedError as error:
        flag = f"--{option.replace('_', '-')}"
        place = flag if model in str(error) else f"{flag} = {model}"
        raise FailedPreconditionError(f"{place}: {error}") from error
