"""Options of the engine: one frozen object. It reads no environment and probes no device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from betoken.engine.rank_group import RankGroup
    from betoken.engine.step import WrapLinear

ACTIVATION_CHOICES = ("exact", "int8", "auto")
COMPILE_CHOICES = ("auto", "on", "off")
QUANTIZE_CHOICES = ("int8", "int4")
DTYPE_CHOICES = ("bfloat16", "float16", "float32", "auto")
_KV_MEMORY_BYTES = 1 << 30
_POSITIVE = (
    *("num_layers", "num_threads", "num_pages", "kv_memory_bytes"),
    *("max_context", "page_size", "max_num_batched_tokens", "max_sequences", "max_draft_tokens"),
    "max_uncommitted",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one model runner.

    Raises:
        ValueError: a field is out of its range; the message names field, value and limit.
    """

    model: str
    """A GGUF file, a local directory in Hugging Face format, a hub id, or `OWNER/NAME:FILE`, a GGUF file of the hub."""
    revision: str | None = None
    """Revision of a hub id; None is its main branch. A directory has none."""
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = "bfloat16"
    """Type of weights, activations and KV; `auto` takes the checkpoint's own."""
    quantize: Literal["int8", "int4"] | None = None
    """Round the linear layers of a dense checkpoint to so many bits, by groups, as it is loaded; None leaves them."""
    activations: Literal["exact", "int8", "auto"] = "exact"
    """Inputs of quantised linear layers on a CPU: `exact`, in `dtype`; `int8`, rounded by blocks of 32, which is faster
    and gives other logits; `auto`, int8 for layers that have a kernel."""
    device: str = "cpu"
    """A torch device."""
    num_layers: int | None = None
    """Load the first so many decoder layers only, with the model's own norm and head; None loads all."""
    num_threads: int | None = None
    """CPU threads of the model's forward; None leaves torch's own choice."""
    num_pages: int | None = None
    """KV pages; None derives them from `kv_memory_bytes`."""
    kv_memory_bytes: int | None = None
    """Memory for KV when `num_pages` is None. None: on a GPU `kv_memory_fraction` of what is left there, elsewhere
    1 GiB, or what a sequence of `max_context` needs if that is set."""
    kv_memory_fraction: float = 0.9
    """On a GPU: part of the memory that the largest forward leaves which KV takes."""
    beside_page_bytes: int = 0
    """Additional memory per KV page, for example of a drafter with its own page for each."""
    beside_bytes: int = 0
    """On a GPU: memory that others take there once the model is loaded."""
    max_context: int | None = None
    """Longest sequence in tokens, which the KV pages have to hold; None is the model's own limit, which it may not
    exceed, or the capacity of the pages."""
    page_size: int = 16
    """Slots per page."""
    prefix_caching: bool = True
    """Keep what full pages hold after their sequence has ended, for others that begin alike."""
    snapshot_memory_bytes: int = 512 << 20
    """Memory for snapshots of recurrent states, which a model that has them finds texts by; 0 = none, and nothing is
    found."""
    max_num_batched_tokens: int = 256
    """Most new tokens one forward may hold."""
    max_sequences: int = 64
    """Sequences open at once. A model with recurrent states has room for twice as many states, because two drafters may
    share it."""
    max_draft_tokens: int = 16
    """Most draft tokens of one sequence in a forward."""
    max_uncommitted: int | None = None
    """Most tokens of a sequence after the committed ones, whose inputs wait next to a recurrent state; None = twice
    `max_draft_tokens` and two."""
    max_graph_rows: int = 256
    """On a GPU: forwards of up to so many new tokens run as captured graphs; 0 for none."""
    batch_invariant: bool = True
    """On a GPU: products whose rows do not depend on the batch. False takes cuBLAS, and with it tokens that do."""
    compile: Literal["auto", "on", "off"] = "auto"
    """`auto`: compiled if possible (on a CPU with a C++ compiler), else eager. `on`: compiled, or fail."""
    cache_dir: Path | None = None
    """Folder for compiled code and packed weights; None is the user's cache directory."""
    feature_layers: Callable[[int], Sequence[int]] | None = None
    """Layers whose hidden states forwards yield, of a model with so many decoder layers; None: of none.

    Numbers follow transformers' `output_hidden_states`: 0 is what the first layer reads, n what the n-th layer
    leaves, and of the last that is after the final norm. -1 is the last, too."""
    shares_embedding: bool = False
    """Whether drafters look up embeddings, which the last pipeline stage then holds, too."""
    wrap_linear: "WrapLinear | None" = None
    """Makes the layer that replaces each linear layer, such as one with adapters; None keeps them. For
    adapter 0 it must compute the same as the layer."""
    adds_to_embeddings: bool = False
    """Whether segments may add vectors to the embeddings of their tokens (`Segment.added`)."""
    ranks: "RankGroup | None" = None
    """Ranks that share the model's layers, each in its own process; None: this process has all of them."""
    self_check: bool = True
    """Compare the loaded engine with the model's own eager forward before serving."""
    reuse_self_check: bool = False
    """On a CPU: keep the result of a comparison that passed in `cache_dir`, and skip it for equal weights, code and
    processor as long as the logits are the same. Packed weights and the compiled forward are then reused, too."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ValueError("model: must not be empty")
        if self.dtype not in DTYPE_CHOICES:
            raise ValueError(f"dtype: {self.dtype!r} is not one of {', '.join(DTYPE_CHOICES)}")
        if self.quantize is not None and self.quantize not in QUANTIZE_CHOICES:
            raise ValueError(f"quantize: {self.quantize!r} is not one of {', '.join(QUANTIZE_CHOICES)}")
        if self.activations not in ACTIVATION_CHOICES:
            raise ValueError(f"activations: {self.activations!r} is not one of {', '.join(ACTIVATION_CHOICES)}")
        if self.compile not in COMPILE_CHOICES:
            raise ValueError(f"compile: {self.compile!r} is not one of {', '.join(COMPILE_CHOICES)}")
        if self.ranks is not None and self.wrap_linear is not None:
            raise ValueError("wrap_linear: not with ranks, which have parts of the linear layers")
        if self.ranks is not None and self.adds_to_embeddings:
            raise ValueError("adds_to_embeddings: true: not with ranks, to which no vectors are sent")
        if self.ranks is not None and not self.batch_invariant:
            raise ValueError("batch_invariant: false: not with ranks, whose products may not depend on their shape")
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value} is below 1")
        for name in ("max_graph_rows", "snapshot_memory_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)} is below 0")
        if not 0.0 < self.kv_memory_fraction <= 1.0:
            raise ValueError(f"kv_memory_fraction: {self.kv_memory_fraction} is outside (0, 1]")

    @property
    def reads_step(self) -> bool:
        """Whether layers of the model read the running step, so that its code serves this process only."""
        return self.wrap_linear is not None or self.adds_to_embeddings

    def num_pages_of(self, page_bytes: int) -> int:
        """`num_pages`, or the number of pages of `page_bytes`, with the memory kept per page, that fit into memory."""
        if self.num_pages is not None:
            return self.num_pages
        page_bytes += self.beside_page_bytes
        if self.kv_memory_bytes is not None:
            return self.kv_memory_bytes // page_bytes
        return max(_KV_MEMORY_BYTES // page_bytes, -(-(self.max_context or 0) // self.page_size))
