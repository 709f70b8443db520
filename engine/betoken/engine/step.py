"""Reports to linear layers which sequence each token of the running step belongs to.

It costs nothing unless a layer reads it. Reading is an operator, so that compiled and recorded forwards read each step.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from betoken.engine.batch import Batch

TokenAdapters = Callable[[Tensor], Tensor]
"""A linear layer's input [..., K] -> `Segment.adapter` of each token's sequence, flat, int64; 0 for padding."""
WrapLinear = Callable[[str, nn.Module, TokenAdapters], nn.Module]
"""Path of a linear layer in the model, the layer, the adapters of its tokens -> the layer that replaces it."""

_numbers = count()
_contexts: "WeakValueDictionary[int, StepContext]" = WeakValueDictionary()


class StepContext:
    """The step that a forward runs now; one for each forward."""

    def __init__(self) -> None:
        self._read: Callable[[bool], Tensor] | None = None
        self._batch: Batch | None = None
        self._number = next(_numbers)  # an operator takes numbers and tensors, not objects
        _contexts[self._number] = self

    def begin(self, batch: Batch) -> None:
        """Report the adapters of this batch from now on."""
        self._batch, self._read = batch, None

    def begin_recorded(self, read: Callable[[bool], Tensor]) -> None:
        """Report adapters from tensors that are filled before each replay: see `adapters`."""
        self._batch, self._read = None, read

    def token_adapters(self, x: Tensor, is_last: bool = False) -> Tensor:
        """Return `Segment.adapter` of each token's sequence, flat, int64; 0 for padding.

        Args:
            x: a linear layer's input [..., K].
            is_last: the layer computes logits, so that its tokens are the tokens with logits.
        """
        found: Tensor = torch.ops.betoken_step.token_adapters(x, self._number, is_last)
        return found

    def adapters(self, num_tokens: int, device: torch.device, is_last: bool) -> Tensor:
        """Return `token_adapters` of an input of `num_tokens` tokens."""
        found = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        if self._read is not None:
            given = self._read(is_last)
        else:
            assert self._batch is not None, "a forward begins its step before it calls the model"
            given = torch.from_numpy(self._batch.token_adapters(is_last))
        found[: len(given)] = given
        return found


def wrap_linears(model: Any, paths: list[str], wrap: WrapLinear | None, step: StepContext) -> None:
    """Replace a model's linear layers by `wrap`'s, if any."""
    if wrap is None:
        return
    last = model.get_output_embeddings()
    for path in paths:
        layer = model.get_submodule(path)
        model.set_submodule(path, wrap(path, layer, partial(step.token_adapters, is_last=layer is last)))


def _token_adapters(x: Tensor, context: int, is_last: bool) -> Tensor:
    return _contexts[context].adapters(x.shape[:-1].numel(), x.device, is_last)


def _token_adapters_shape(x: Tensor, context: int, is_last: bool) -> Tensor:
    num_tokens: Any = 1
    for size in x.shape[:-1]:
        num_tokens = num_tokens * size
    return x.new_empty(num_tokens, dtype=torch.int64)


torch.library.define("betoken_step::token_adapters", "(Tensor x, int context, bool is_last) -> Tensor")
torch.library.impl("betoken_step::token_adapters", "CompositeExplicitAutograd", _token_adapters)
torch.library.register_fake("betoken_step::token_adapters", _token_adapters_shape)
