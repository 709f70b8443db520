"""A rank after rank 0: loads its part of the model, then follows rank 0. It serves nothing and checks no logits."""

import gc
from dataclasses import replace
from typing import Any, NoReturn

import torch

from betoken.engine.bring_up.examine import examine, refusing
from betoken.engine.bring_up.prepare import prepare
from betoken.engine.config import EngineConfig
from betoken.engine.model_info import ModelInfo
from betoken.engine.ranks.following import Follower
from betoken.engine.ranks.leading import agree
from betoken.engine.ranks.loading import load_part
from betoken.engine.weights.activations import select_activations
from betoken.kernels.code_folder import user_cache_dir


def follow(config: EngineConfig) -> NoReturn:
    """Load the model as rank 0 does and do what rank 0 announces, until rank 0 ends.

    Raises:
        ModelRefusedError: the model cannot be served exactly, with the reason.
        RankLostError: another rank has ended.
    """
    torch.set_num_threads(config.num_threads or torch.get_num_threads())
    assert config.ranks is not None, "a rank follows the ranks of its config"
    while True:
        follow_model(config, *load_part(config, _unheard))
        gc.collect()


def follow_model(config: EngineConfig, model: Any, info: ModelInfo) -> None:
    """Follow rank 0 with a loaded part of the model until it loads the model anew; errors as of `follow`."""
    assert config.ranks is not None, "a rank follows the ranks of its config"
    select_activations(config, model)
    examined = examine(replace(config, self_check=False), model, info, _unheard)
    with refusing(model):
        forward, _ = prepare(config, examined, _unheard)
    agree(config.ranks, info, forward)
    Follower(model, forward, config.ranks, config.cache_dir or user_cache_dir()).run()


def _unheard(stage: str, fraction: float) -> None:
    """Progress without a receiver: rank 0 reports its own."""
