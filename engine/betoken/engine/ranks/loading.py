"""Loads a model whole, or a rank's columns of it."""

from typing import Any

from betoken.engine.config import EngineConfig
from betoken.engine.model_info import ModelInfo
from betoken.engine.ranks.split import Split
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.loading import load_model


def load_part(config: EngineConfig, progress: Progress) -> tuple[Any, ModelInfo]:
    """Return what the process of this config has of its model, and the whole model's description.

    Raises:
        ModelRefusedError: see `load_model`.
    """
    return load_model(config, progress, None if config.ranks is None else Split(config.ranks))
