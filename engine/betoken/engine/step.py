"""Reports to a model's layers what the running step knows of its tokens: to linear layers the sequence of each token,
to the embedding layer the vectors that are added to its output.

It costs nothing unless a layer reads it. Reading is an operator, so that compiled and recorded forwards read each step.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from betoken.engine.batch import Batch, Segment

NAMESPACE = "betoken_step"
"""Namespace of the operators below, each of which treats a row by itself."""
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
        self._added: Tensor | None = None
        self.adds_to_embeddings = False
        """Whether the embedding layer adds the vectors of the step."""
        self._number = next(_numbers)  # an operator takes numbers and tensors, not objects
        _contexts[self._number] = self

    def begin(self, batch: Batch) -> None:
        """Report the adapters and vectors of this batch from now on."""
        self._batch, self._read, self._added = batch, None, batch.added

    def begin_recorded(self, read: Callable[[bool], Tensor], added: Tensor | None = None) -> None:
        """Report adapters and vectors [B, H] from tensors that are filled before each replay: see `adapters`."""
        self._batch, self._read, self._added = None, read, added

    def add_to_embeddings(self, model: Any) -> None:
        """Have the model's embedding layer add the vectors of each step to its output, before any scale of the model.

        An embedding without them keeps its values.
        """

        def add(layer: nn.Module, inputs: Any, embedded: Tensor) -> Tensor:
            total: Tensor = torch.ops.betoken_step.add_vectors(embedded, self._number)
            return total

        model.get_input_embeddings().register_forward_hook(add)
        self.adds_to_embeddings = True

    def with_vectors(self, embedded: Tensor) -> Tensor:
        """Embeddings [..., R, H] -> new ones, with the vectors of the step's rows added."""
        total = embedded.clone(memory_format=torch.contiguous_format)
        if self._added is not None:
            rows = total.view(-1, total.shape[-1])
            rows[: len(self._added)] += self._added
        return total

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


def added_vectors(segments: Sequence[Segment]) -> Tensor | None:
    """`Segment.added` of all rows [R, H], zero for segments without; None if no segment has any.

    Raises:
        ValueError: a segment's vectors are not one for each of its tokens, or of another width than others'.
    """
    found = [segment.added for segment in segments if segment.added is not None]
    if not found:
        return None
    for index, segment in enumerate(segments):
        wanted = (len(segment.ids), found[0].shape[-1])
        if segment.added is not None and segment.added.shape != wanted:
            raise ValueError(f"segments[{index}].added: {list(segment.added.shape)}: must be {list(wanted)}")
    width = found[0].shape[-1]
    return torch.cat(
        [
            found[0].new_zeros(len(segment.ids), width) if segment.added is None else segment.added
            for segment in segments
        ]
    )


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


def _add_vectors(embedded: Tensor, context: int) -> Tensor:
    return _contexts[context].with_vectors(embedded)


def _add_vectors_shape(embedded: Tensor, context: int) -> Tensor:
    return torch.empty_like(embedded, memory_format=torch.contiguous_format)


torch.library.define("betoken_step::add_vectors", "(Tensor embedded, int context) -> Tensor")
torch.library.impl("betoken_step::add_vectors", "CompositeExplicitAutograd", _add_vectors)
torch.library.register_fake("betoken_step::add_vectors", _add_vectors_shape)
