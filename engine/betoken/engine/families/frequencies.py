"""Frequencies of rotary positions that transformers chooses by the longest text of a batch: settled at load instead.

A row then depends on its own position. It knows configurations and their rotary layers, not how these are applied.
"""

from collections.abc import Iterator
from typing import Any

from betoken.engine.errors import ModelRefusedError
from betoken.engine.families import family_of


def settle_frequencies(config: Any, max_context: int, is_asked: bool) -> None:
    """Leave LongRoPE one set of factors: the short ones within its original length, the long ones beyond.

    Args:
        config: the text configuration of a transformers model.
        max_context: the longest sequence that will be served, in tokens.
        is_asked: whether the operator named that length; the long factors change short texts, too.

    Raises:
        ModelRefusedError: frequencies that would change within `max_context`.
    """
    for rope in rope_parameters(config):
        rope_type = str(rope.get("rope_type") or rope.get("type") or "default")
        if "dynamic" in rope_type:
            _check_dynamic(rope_type, getattr(config, "max_position_embeddings", None), max_context)
        if rope_type == "longrope":
            original = rope.get("original_max_position_embeddings") or getattr(
                config, "original_max_position_embeddings", None
            )
            if original is not None and max_context <= original:
                continue
            if original is None or not is_asked:
                raise ModelRefusedError(
                    f"rope type 'longrope' has different frequencies beyond its original length ({original}), which"
                    f" transformers chooses by the longest text of a batch: set max_context, to {original} or less for"
                    " those of short texts, or to more, and all texts take those of long ones"
                )
            family_of(getattr(config, "model_type", "")).take_long_factors(rope)


def freeze_frequencies(model: Any) -> None:
    """Have rotary layers keep the frequencies they were made with: what is served never leads out of them."""
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            module.rope_type = _frozen(rope_type)
        elif isinstance(rope_type, dict):
            module.rope_type = {layer: _frozen(own) for layer, own in rope_type.items()}


def _check_dynamic(rope_type: str, own: int | None, max_context: int) -> None:
    if own is None or max_context > own:
        raise ModelRefusedError(
            f"rope type {rope_type!r} changes frequencies with the largest position of the batch beyond {own} tokens: a"
            f" neighbour would change the text (max_context is {max_context})"
        )


def _frozen(rope_type: str) -> str:
    return "default" if "dynamic" in rope_type or rope_type == "longrope" else rope_type


def rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    """The one rope description of a model, or one per layer type."""
    for name in ("rope_parameters", "rope_scaling"):
        given = getattr(config, name, None)
        if not isinstance(given, dict):
            continue
        nested = [entry for entry in given.values() if isinstance(entry, dict)]
        yield from nested or [given]
