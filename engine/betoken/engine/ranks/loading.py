"""Loads a model whole, or a rank's layers and columns of it."""

from typing import Any

from betoken.engine.config import EngineConfig
from betoken.engine.model_info import ModelInfo
from betoken.engine.ranks.split import Split
from betoken.engine.ranks.stages import StageSplit
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.loading import load_model
from betoken.engine.weights.packed import FindPacked


def load_part(config: EngineConfig, progress: Progress, find_packed: FindPacked | None = None) -> tuple[Any, ModelInfo]:
    """Return what the process of this config has of its model, and the whole model's description.

    Raises:
        ModelRefusedError: see `load_model`.
    """
    if config.ranks is None:
        return load_model(config, progress, find_packed=find_packed)
    is_staged = config.ranks.num_stages > 1
    return load_model(config, progress, StageSplit(config.ranks) if is_staged else Split(config.ranks))
