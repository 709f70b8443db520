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
from betoken.engine.ranks.split import split_layers
from betoken.engine.weights.activations import select_activations
from betoken.engine.weights.loading import load_model
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
        config.ranks.wait_for_turn()  # one whole model at a time takes this machine's memory
        follow_model(config, *load_model(config, _unheard))
        gc.collect()


def follow_model(config: EngineConfig, model: Any, info: ModelInfo) -> None:
    """End the turn with a loaded model, and follow rank 0 until it loads the model anew; errors as of `follow`."""
    assert config.ranks is not None, "a rank follows the ranks of its config"
    select_activations(config, model)
    examined = examine(replace(config, self_check=False), model, info, _unheard)
    with refusing(model):
        examined = replace(examined, shapes=split_layers(model, examined.shapes, config.ranks))
        config.ranks.end_turn()
        forward, _ = prepare(config, examined, _unheard)
    agree(config.ranks, info, forward)
    Follower(model, forward, config.ranks, config.cache_dir or user_cache_dir()).run()


def _unheard(stage: str, fraction: float) -> None:
    """Progress without a receiver: rank 0 reports its own."""
