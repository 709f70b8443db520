"""Parts that drafters on hidden states share with their target: embedding, output layer, and its kind of products.

Every row has the same bits whatever its neighbours, as in a forward. It knows tensors, not sequences or pages.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.kv_pool import KvPool

MakeLinear = Callable[[Tensor, Tensor | None, bool], nn.Module]
"""weight [N, K], bias [N] or None, whether the result is the float32 sums -> the layer's replacement."""


def _use_stock_experts(model: Any) -> None:
    model.set_experts_implementation("batched_mm")


class ModelParts:
    """A loaded model's parts; one for each forward, on the thread that owns it."""

    def __init__(
        self,
        model: Any,
        make_linear: MakeLinear,
        rows_alone: Callable[[], AbstractContextManager[Any]] = nullcontext,
        use_experts: Callable[[Any], object] = _use_stock_experts,
    ) -> None:
        self._model = model
        self._make_linear = make_linear
        self.rows_alone = rows_alone
        """Opens a context in which eager elementwise functions and norms treat each row by itself, too."""
        self.use_experts = use_experts
        """Has a model of transformers, still on the CPU, run its experts as the target's."""
        self.catch_up: Callable[[], None] = lambda: None
        """Finishes forwards of the model that are under way, so that the parts can be used within another forward."""
        self.pool: KvPool | None = None
        """Keys and values of the model, which drafters may read."""

    @property
    def config(self) -> Any:
        """Configuration of the language model."""
        return self._model.config.get_text_config(decoder=True)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        size: int = self.config.hidden_size
        return size

    @property
    def num_layers(self) -> int:
        """Decoder layers; hidden states are numbered 0 to this."""
        num: int = self.config.num_hidden_layers
        return num

    @property
    def dtype(self) -> torch.dtype:
        """Type of hidden states and weights."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        """Device of the parts."""
        device: torch.device = self._model.device
        return device

    @property
    def rotary(self) -> nn.Module | None:
        """The module that makes angles of positions, with the frequencies of the served context; None without one."""
        rotary: nn.Module | None = getattr(self._model.get_decoder(), "rotary_emb", None)
        return rotary

    def linear(self, weight: Tensor, bias: Tensor | None = None, keeps_sums: bool = False) -> nn.Module:
        """A layer y = x W^T + b of the model's own kind: weight [N, K], bias [N] -> a module [..., K] -> [..., N].

        `keeps_sums`: the result is float32, as logits are.
        """
        weight = weight.to(self.device, self.dtype)
        return self._make_linear(weight, None if bias is None else bias.to(self.device, self.dtype), keeps_sums)

    def head(self, states: Tensor) -> Tensor:
        """States after the final norm [..., H] -> logits [..., V] float32, before any cap or scale of the model."""
        logits: Tensor = self._model.get_output_embeddings()(states)
        return logits.float()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [...] int64 -> what the embedding layer gives for them [..., H]."""
        layer = self._model.get_input_embeddings()
        rows: Tensor = (getattr(layer, "shared", None) or layer)(token_ids)
        return rows
