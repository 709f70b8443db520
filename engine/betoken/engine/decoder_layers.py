"""The decoder layers of a model, and their results as a compiled forward keeps them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


def find_decoder_layers(model: Any) -> tuple[str, nn.ModuleList] | None:
    """Return the path and the list of a model's decoder layers; None without one."""
    config = getattr(model, "config", None)
    num_layers = None if config is None else config.get_text_config(decoder=True).num_hidden_layers
    lists = [(path, module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    found = [each for each in lists if len(each[1]) == num_layers]
    return min(found, key=lambda each: each[0].count("."), default=None)


@contextmanager
def materialized_results(model: Any, materialize: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within it, each decoder layer's hidden states pass through `materialize`, an operator that compilers keep whole.

    Otherwise a compiler fuses a layer's last sum with the norm of the next layer, which then reads the sum before it is
    rounded to bfloat16. The bits would depend on which layers are compiled together, that is, on the pipeline stages.
    """

    def hook(layer: nn.Module, inputs: Any, result: Any) -> Any:
        return (materialize(result[0]), *result[1:]) if isinstance(result, tuple) else materialize(result)

    found = find_decoder_layers(model)
    layers = [layer for layer in found[1] if any(True for _ in layer.parameters())] if found is not None else []
    handles = [layer.register_forward_hook(hook) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
