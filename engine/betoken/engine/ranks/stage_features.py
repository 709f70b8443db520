"""Hidden states of layers over pipeline stages: each stage sends the states of its own and of earlier layers with
its result, so that the last stage has all of them.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from betoken.engine.errors import ModelRefusedError
from betoken.engine.features import Features


class StageFeatures(Features):
    """Hidden states that pass through one stage.

    State i is the result of layer i - 1, state 0 the input of layer 0, and the last one the state after the final norm.
    """

    def __init__(self, layers: tuple[int, ...], own: range, num_layers: int) -> None:
        """`own`: decoder layers of the stage, of `num_layers` in all."""
        super().__init__(layers)
        self._own, self._num_layers = own, num_layers
        self._earlier = [layer for layer in layers if layer < own.start]
        self._sent = [layer for layer in layers if layer < own.stop]
        self._held: dict[int, Tensor] = {}
        """Hidden states [1, R, H] of the forward under way, by number."""

    @property
    def num_received(self) -> int:
        """Tensors that the previous stage sends: its result, and hidden states of layers before its last."""
        return 1 + len(self._earlier)

    def keywords(self) -> dict[str, Any]:
        """See `Features`; the code of transformers would count the layers of this stage alone."""
        return {}

    def check(self, model: Any, output: Any) -> None:
        """See `Features`."""
        if self._is_last and (missing := sorted(set(self.layers) - set(self._held))):
            raise ModelRefusedError(f"{type(model).__name__} does not give the hidden states of layers {missing}")

    def results(self, output: Any) -> tuple[Tensor, ...]:
        """See `Features`; nothing on a stage that sends them on."""
        if not self._is_last:
            return ()
        held, self._held = self._held, {}
        return (torch.stack([held[layer][0] for layer in self.layers], dim=1),)

    def listen(self, decoder: nn.Module, layers: nn.ModuleList) -> None:
        """Keep hidden states of the stage's layers in each forward from now on. `decoder`: ends with the final norm."""
        if 0 in self.layers and self._own.start == 0:
            layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)
        for layer in self.layers:
            if self._own.start < layer < self._own.stop:
                layers[layer - 1].register_forward_hook(partial(self._keep_result, layer))
        if self._is_last and self._num_layers in self.layers:
            decoder.register_forward_hook(partial(self._keep_result, self._num_layers))

    def pack(self, x: Tensor) -> Tensor:
        """Hidden states [1, R, H] for the next stage -> what it receives [N, R, H]."""
        held, self._held = self._held, {}
        return torch.cat([x, *(held[layer] for layer in self._sent)]) if self._sent else x

    def unpack(self, received: Tensor) -> Tensor:
        """Message of the previous stage [N, R, H] -> its result [1, R, H]."""
        x, *earlier = torch.split(received, 1) if self._earlier else (received,)
        self._held = dict(zip(self._earlier, earlier, strict=True))
        if self._own.start in self.layers:
            self._held[self._own.start] = x
        return x

    @property
    def _is_last(self) -> bool:
        return self._own.stop == self._num_layers

    def _keep_input(self, module: nn.Module, arguments: Any, keywords: dict[str, Any]) -> None:
        self._held[0] = arguments[0] if arguments else next(iter(keywords.values()))

    def _keep_result(self, number: int, module: nn.Module, arguments: Any, result: Any) -> None:
        self._held[number] = result if isinstance(result, Tensor) else result[0]
