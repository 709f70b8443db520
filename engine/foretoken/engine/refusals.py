"""What a model's configuration rules out, with the reason. It reads the configuration only."""

from collections.abc import Iterator
from typing import Any

from foretoken.engine.errors import ModelRefusedError

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "attention", "dense", "sparse", "mlp"})


def check_config(config: Any, max_context: int) -> None:
    """Refuse what reads more than a row's own sequence and position.

    Args:
        config: the text configuration of a transformers model.
        max_context: the longest sequence that will be served, in tokens.

    Raises:
        ModelRefusedError: with the reason.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelRefusedError("encoder-decoder models are not supported")
    for layer_type in getattr(config, "layer_types", None) or ():
        if layer_type not in _LAYER_TYPES:
            raise ModelRefusedError(f"layer type {layer_type!r} is neither full nor sliding attention")
    for rope in _rope_parameters(config):
        rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
        if "dynamic" in rope_type:
            raise ModelRefusedError(
                f"rope type {rope_type!r} reads the largest position of the batch: a neighbour would change the text"
            )
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope_type == "longrope" and (original is None or max_context > original):
            raise ModelRefusedError(
                f"rope type 'longrope' beyond its original length ({original}) reads the largest position of the batch:"
                f" set max_context to {original} or less (it is {max_context})"
            )


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The one rope description of a model, or one per layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, dict):
            continue
        nested = [entry for entry in given.values() if isinstance(entry, dict)]
        yield from nested or [given]
