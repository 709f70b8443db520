"""A worker's description of its model. It knows no tensors."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A worker's description of its model."""

    model_id: str
    """The hub id, or the directory's name."""
    dtype: str
    """`bfloat16`, `float16` or `float32`."""
    vocab_size: int
    """Rows of the logits; may exceed the tokenizer's size."""
    max_context: int
    """Longest sequence, prompt and output, in tokens."""
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, Any] = field(hash=False)
    """The sampling fields that generation_config.json sets."""
    weights_fingerprint: str
    tokenizer_hash: str
    """Empty when the checkpoint has no tokenizer.json, and on ranks after rank 0."""
    num_parameters: int
    tokenizer_text: Callable[[], str] = field(default=lambda: "", repr=False, compare=False)
    """Reads the tokenizer.json's text; empty if the checkpoint has none."""
    path: Path | None = field(default=None, compare=False)
    """The checkpoint's directory or file."""
    media_token_ids: tuple[int, ...] = ()
    """Ids that stand for pieces of images, sound or video, which are not served."""
    mask_token_id: int | None = None
    """Mask token of a PARD drafter, which predicts several tokens in one forward; None for other models."""
