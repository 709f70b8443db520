"""A step as transformers takes it: static cache, sdpa attention, eager or compiled, greedy ids read on the host."""

from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache


class StaticCacheSteps:
    """Steps of `rows` tokens after a context, again and again from the same state."""

    def __init__(self, model: Any, context_ids: list[int], rows: int, is_compiled: bool) -> None:
        self._context = len(context_ids)
        self._device: torch.device = model.device
        self._cache = StaticCache(config=model.config, max_cache_len=self._context + rows)
        self._model = model
        self._forward(self._tensor(context_ids), 0)  # prefill is never compiled
        if is_compiled:
            self._model = torch.compile(model, mode="reduce-overhead", dynamic=False)

    def step(self, ids: list[int]) -> list[int]:
        """The greedy id after each row."""
        layers: list[Any] = list(self._cache.layers)
        for layer in layers:  # the step before this one has moved on
            length = layer.cumulative_length
            layer.cumulative_length = length.fill_(self._context) if isinstance(length, Tensor) else self._context
        greedy: list[int] = self._forward(self._tensor(ids), self._context).argmax(dim=-1).tolist()
        return greedy

    def _forward(self, ids: Tensor, start: int) -> Tensor:
        positions = torch.arange(start, start + ids.shape[1], device=self._device)[None]
        output = self._model(input_ids=ids, position_ids=positions, past_key_values=self._cache, use_cache=True)
        logits: Tensor = output.logits[0]
        return logits

    def _tensor(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self._device)
