"""Loads a model whole, or a rank's layers and columns of it."""

from typing import Any

from betoken.engine.config import EngineConfig
from betoken.engine.model_info import ModelInfo
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.split import Split
from betoken.engine.ranks.stages import StageSplit
from betoken.engine.weights.checkpoint import Progress
from betoken.engine.weights.loading import load_model
from betoken.engine.weights.packed import FindPacked
from betoken.engine.weights.stored import ModelSplit


def load_part(config: EngineConfig, progress: Progress, find_packed: FindPacked | None = None) -> tuple[Any, ModelInfo]:
    """Return what the process of this config has of its model, and the whole model's description.

    Raises:
        ModelRefusedError: see `load_model`.
    """
    if config.ranks is None:
        return load_model(config, progress, find_packed=find_packed)
    return load_model(config, progress, _split(config.ranks, config.shares_embedding))


def _split(ranks: RankGroup, shares_embedding: bool) -> ModelSplit:
    return StageSplit(ranks, shares_embedding) if ranks.num_stages > 1 else Split(ranks)
