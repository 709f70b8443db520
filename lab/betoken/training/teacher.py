"""The target as training sees it: a frozen forward that gives logits and the hidden states of named layers.

It is read by the engine's loader, so that every checkpoint the engine serves can be a target. It knows no drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from betoken.engine.config import EngineConfig
from betoken.engine.weights.loading import load_model

LAST = -1
"""Number of the layer after the final norm."""


@dataclass(frozen=True, slots=True)
class Taught:
    """The target's results for a batch."""

    logits: torch.Tensor
    """[B, T, V], in the target's dtype."""
    features: tuple[torch.Tensor, ...]
    """[B, T, H] of each layer asked for."""


class Teacher:
    """A target in eval mode, without gradients."""

    def __init__(self, model: Any, name: str = "") -> None:
        """Args:
        model: a causal language model of transformers, with an attention that needs no pages.
        name: path or hub id.
        """
        self.name = name
        self.model = model.eval().requires_grad_(False)

    @classmethod
    def load(cls, path: str, dtype: str, device: str) -> Teacher:
        """Raises:
        ModelRefusedError: the engine does not read this checkpoint, with the reason.
        """
        model, _ = load_model(EngineConfig(path, dtype=dtype, device=device), lambda stage, fraction: None)  # type: ignore[arg-type]
        model.set_attn_implementation("sdpa")
        return cls(model, path)

    @property
    def config(self) -> Any:
        """Configuration of the text decoder."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def head(self) -> Any:
        """The layer from the last hidden state to logits."""
        return self.model.get_output_embeddings()

    @property
    def embedding(self) -> Any:
        """The layer from ids to hidden states."""
        return self.model.get_input_embeddings()

    @torch.no_grad()
    def hidden(self, ids: torch.Tensor) -> torch.Tensor:
        """The last hidden state [B, T, H], after the final norm, of ids [B, T]."""
        hidden: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return hidden

    def __call__(self, ids: torch.Tensor, layers: Sequence[int]) -> Taught:
        """Logits and features after ids [B, T].

        Args:
            layers: as transformers numbers `output_hidden_states`: 0 after the embedding, n after n layers; `LAST` is
                after the final norm.
        """
        inner = any(layer != LAST for layer in layers)
        with torch.no_grad():
            output = self.model.base_model(input_ids=ids, use_cache=False, output_hidden_states=inner)
            logits = self.head(output.last_hidden_state)
        last = output.last_hidden_state
        return Taught(logits, tuple(last if layer == LAST else output.hidden_states[layer] for layer in layers))
