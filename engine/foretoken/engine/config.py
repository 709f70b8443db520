"""What the engine may be told: one frozen object. It reads no environment and probes no device."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

COMPILE_CHOICES = ("auto", "on", "off")
DTYPE_CHOICES = ("bfloat16", "float16", "float32", "auto")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one model runner.

    Raises:
        ValueError: a field is out of its range; the message names field, value and limit.
    """

    model: str
    """A local directory in Hugging Face format, or a hub id."""
    revision: str | None = None
    """Hub revision; ignored for a directory."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Type of weights, activations and KV; `auto` takes the checkpoint's own."""
    device: str = "cpu"
    """A torch device."""
    num_threads: int | None = None
    """CPU threads of the model's forward; None leaves torch's own choice."""
    num_pages: int | None = None
    """KV pages; None derives them from `kv_memory_bytes`."""
    kv_memory_bytes: int = 1 << 30
    """Memory for KV when `num_pages` is None; at least one full-length sequence is always given room."""
    max_context: int | None = None
    """Longest sequence in tokens; None is the model's own limit, which it may not exceed."""
    page_size: int = 16
    """Slots per page."""
    max_batch_rows: int = 256
    """Most new tokens one forward may hold."""
    compile: Literal["auto", "on", "off"] = "auto"
    """`auto`: compiled on a CPU that has a C++ compiler, else eager. `on`: fail if that is not possible."""
    cache_dir: Path | None = None
    """Where compiled code is kept; None is the user's cache directory."""
    self_check: bool = True
    """Compare the loaded engine with the model's own eager forward before serving."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: must not be empty")
        if self.dtype not in DTYPE_CHOICES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_CHOICES)}")
        if self.compile not in COMPILE_CHOICES:
            raise ValueError(f"compile: {self.compile!r} is not one of {', '.join(COMPILE_CHOICES)}")
        for name in ("num_threads", "num_pages", "kv_memory_bytes", "max_context", "page_size", "max_batch_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")
