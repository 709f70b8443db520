"""The forward of a GPU on pipeline stages, run on the CPU: the bits of one process."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from betoken.engine.bring_up.examine import examine
from betoken.engine.config import EngineConfig
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_linear import RowLinear
from betoken.engine.kv_pool import KvPool
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks.loading import load_part
from betoken.engine.weights.layers import replace_linears
from tests.engine.cuda.harness import MAX_CONTEXT, NUM_PAGES, PAGE_SIZE, batches
from tests.engine.rank_threads import TIMEOUT_S, config_of, joined
from tests.engine.tiny import save_tiny


@torch.inference_mode()
def results_of(config: EngineConfig, group: RankGroup | None) -> list[tuple[Tensor, Tensor | None]]:
    """Logits and hidden states of one rank."""
    config = replace(config, ranks=group)
    model, info = load_part(config, lambda stage, fraction: None)
    examined = examine(config, model, info, lambda stage, fraction: None)
    pool = KvPool(examined.shapes, NUM_PAGES + 1, PAGE_SIZE, model.dtype, model.device)
    replace_linears(model, RowLinear)
    use_row_experts(model)
    forward = CudaForward(model, pool, MAX_CONTEXT, "fake", True, examined.features)
    outputs = [forward(batch).copy() for batch in batches()]
    return [(output.logits, output.features) for output in outputs]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_two_stages_have_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, family), feature_layers=lambda num: (0, num))
    alone = results_of(config, None)
    with joined(2, 2) as groups, ThreadPoolExecutor(2) as threads:
        first, _ = list(threads.map(results_of, [config] * 2, groups, timeout=TIMEOUT_S))
    for (logits, features), (expected, expected_features) in zip(first, alone, strict=True):
        assert torch.equal(logits, expected)
        assert features is not None and expected_features is not None and torch.equal(features, expected_features)
