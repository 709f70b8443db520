"""Hidden states of a model's layers, which its forwards return next to the logits for drafters."""

from typing import Any

import torch
from torch import Tensor

from betoken.engine.errors import ModelRefusedError


class Features:
    """Layers whose hidden states forwards return: see `ModelRunner.feature_layers`."""

    def __init__(self, layers: tuple[int, ...] = ()) -> None:
        self.layers = layers

    def keywords(self) -> dict[str, Any]:
        """Return the arguments by which a model of transformers returns them."""
        return {"output_hidden_states": list(self.layers)} if self.layers else {}

    def check(self, model: Any, output: Any) -> None:
        """Check that a model's output has them.

        Raises:
            ModelRefusedError: it does not.
        """
        if not self.layers:
            return
        states = getattr(output, "hidden_states", None) or ()
        num_layers: int = model.config.get_text_config(decoder=True).num_hidden_layers
        if len(states) != num_layers + 1 or any(states[layer] is None for layer in self.layers):
            raise ModelRefusedError(
                f"{type(model).__name__} does not give the hidden states of its {num_layers} layers"
            )

    def results(self, output: Any) -> tuple[Tensor, ...]:
        """Return them as one tensor [R, num_layers, H]; nothing if no layer is requested."""
        if not self.layers:
            return ()
        return (torch.stack([output.hidden_states[layer][0] for layer in self.layers], dim=1),)


NO_FEATURES = Features()
