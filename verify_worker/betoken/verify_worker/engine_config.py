"""The engine's options of a verify worker, the same on all its ranks."""

from functools import partial

import torch

from betoken.drafters.host.making import attached_layers, attached_memory
from betoken.drafters.registry import SPECS
from betoken.engine.config import EngineConfig
from betoken.verify_worker.launched import num_local_ranks
from betoken.verify_worker.settings import VerifyWorkerSettings


def engine_config(settings: VerifyWorkerSettings) -> EngineConfig:
    """Return the options of the target, with room for the attached drafters. Ranks divide the machine's cores.

    Raises:
        FailedPreconditionError: weights of a drafter cannot be read.
    """
    memory = attached_memory(settings)
    options = settings.engine_options()
    num_ranks = num_local_ranks(settings)
    if num_ranks > 1 and settings.threads is None:
        options["num_threads"] = max(1, torch.get_num_threads() // num_ranks)
    return EngineConfig(
        **options,
        feature_layers=partial(attached_layers, settings),
        shares_embedding=any(need.embeds for name in settings.attached_drafters if (need := SPECS[name].features)),
        beside_bytes=memory.weight_bytes,
        beside_page_bytes=memory.page_bytes,
    )
