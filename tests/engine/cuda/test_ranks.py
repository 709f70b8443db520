"""The forward of a GPU on ranks and pipeline stages, run on the CPU: the bits of one process."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from betoken.engine.bring_up.examine import examine
from betoken.engine.config import EngineConfig
from betoken.engine.cuda.forward import CudaForward
from betoken.engine.cuda.row_experts import use_row_experts
from betoken.engine.cuda.row_linear import RowLinear, order_as_whole, replace_grouped
from betoken.engine.kv_pool import KvPool
from betoken.engine.model_info import ModelInfo
from betoken.engine.ranks.loading import load_part
from betoken.engine.weights.layers import replace_linears
from betoken.kernels import expert_linear, expert_linear_grouped, linear, linear_grouped
from tests.engine import quantized_files as files
from tests.engine.cuda.harness import MAX_CONTEXT, NUM_PAGES, PAGE_SIZE, batches
from tests.engine.rank_threads import QUANTIZED, TIMEOUT_S, config_of, joined
from tests.engine.tiny import save_tiny

ORDERS: dict[int, list[tuple[int, int]]] = {}
"""Inputs and outputs of each product, or of the whole layer of which a rank has a part, by thread: on a GPU they
choose the order of the sums."""


@torch.inference_mode()
def results_of(config: EngineConfig, model: Any, info: ModelInfo) -> list[tuple[Tensor, Tensor | None]]:
    """Logits and hidden states of one rank."""
    examined = examine(config, model, info, _unheard)
    pool = KvPool(examined.shapes, NUM_PAGES + 1, PAGE_SIZE, model.dtype, model.device)
    replace_grouped(model)
    replace_linears(model, RowLinear)
    order_as_whole(model)
    use_row_experts(model)
    forward = CudaForward(model, pool, MAX_CONTEXT, "fake", True, examined.features)
    ORDERS.pop(threading.get_ident(), None)  # of the probe, which keeps the models' own products
    outputs = [forward(batch).copy() for batch in batches()]
    return [(output.logits, output.features) for output in outputs]


def _unheard(stage: str, fraction: float) -> None:
    """Progress without a receiver."""


Results = list[tuple[Tensor, Tensor | None]]


def run(config: EngineConfig, size: int, num_stages: int) -> tuple[Results, Results]:
    """Results of one process, and of rank 0."""
    alone = results_of(config, *load_part(config, _unheard))
    with joined(size, num_stages) as groups, ThreadPoolExecutor(size) as threads:
        configs = [replace(config, ranks=group) for group in groups]
        parts = [load_part(each, _unheard) for each in configs]  # one after the other, as transformers needs it
        first, *_ = list(threads.map(results_of, configs, *zip(*parts, strict=True), timeout=TIMEOUT_S))
    return alone, first


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_two_stages_have_the_bits_of_one_process(family: str, tmp_path: Path) -> None:
    config = config_of(save_tiny(tmp_path, family), feature_layers=lambda num: (0, num))
    alone, first = run(config, 2, 2)
    for (logits, features), (expected, expected_features) in zip(first, alone, strict=True):
        assert torch.equal(logits, expected)
        assert features is not None and expected_features is not None and torch.equal(features, expected_features)


@pytest.fixture
def recorded_orders(monkeypatch: pytest.MonkeyPatch) -> None:
    ORDERS.clear()
    for package in (linear, expert_linear, linear_grouped, expert_linear_grouped):
        product = package.IMPLEMENTATIONS["reference"]

        def record(x: Tensor, *rest: Any, product: Callable[..., Tensor] = product) -> Tensor:
            out = product(x, *rest)
            ORDERS.setdefault(threading.get_ident(), []).append((x.shape[1], rest[-1] or out.shape[1]))
            return out

        monkeypatch.setitem(package.IMPLEMENTATIONS, "reference", record)


def check_orders(config: EngineConfig, size: int) -> None:
    run(config, size, 1)
    alone, *ranks = ORDERS.values()
    assert len(ranks) == size and all(rank == alone for rank in ranks)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.usefixtures("recorded_orders")
def test_ranks_add_up_in_the_order_of_the_whole_layers(family: str, tmp_path: Path) -> None:
    check_orders(config_of(save_tiny(tmp_path, family)), 2)


@pytest.mark.usefixtures("recorded_orders")
def test_ranks_add_up_quantized_weights_in_the_order_of_the_whole_layers(tmp_path: Path) -> None:
    files.write_quantized(Path(save_tiny(tmp_path, "llama")), *QUANTIZED["gptq"])
    check_orders(config_of(str(tmp_path)), 2)
