"""The options both kinds of worker share: which model, in which arithmetic, with how much memory and how large batches.

Knows the options' names and bounds, not the engine that honours them.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from betoken.common.logs import configure_logging
from betoken.common.synthetic import Simulation
from betoken.rpc.rank_devices import MAX_RANKS, rank_devices
from betoken.rpc.settings import ServiceSettings

_ENGINE_FIELDS = (
    *("model", "revision", "dtype", "quantize", "activations", "num_pages", "kv_memory_bytes", "page_size"),
    *(
        "prefix_caching",
        "snapshot_memory_bytes",
        "max_num_batched_tokens",
        "max_sequences",
        "max_draft_tokens",
        "max_graph_rows",
        "compile",
        "batch_invariant",
        "cache_dir",
    ),
)


USUAL_PREFILL_ROWS = 64
"""Default limit of prompt tokens in a forward with other sequences."""


class WorkerSettings(ServiceSettings):
    """Options of a process that runs a model."""

    page_size: ClassVar[int] = 16
    """Slots of a KV page, tokens. Larger pages waste more slots at the end of a sequence and match shorter prefixes;
    smaller ones make page tables longer."""
    max_graph_rows: ClassVar[int] = 256
    """On a GPU: longest forward that runs as a captured graph, tokens; longer forwards are not bound by launches."""

    model: str = Field(
        description="Model: a GGUF file, a directory in Hugging Face format, a hub id, or OWNER/NAME:Q4_K_M, a GGUF"
        " file of the hub.",
    )
    revision: str | None = Field(None, min_length=1, description="Hub revision of the model.")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "bfloat16", description="Type of weights, activations and KV; auto = the checkpoint's own."
    )
    quantize: Literal["int8", "int4"] | None = Field(
        None, description="Integer type that linear layers of dense checkpoints are rounded to at load; default: none."
    )
    activations: Literal["exact", "int8", "auto"] = Field(
        "exact",
        description="Inputs of quantised linear layers on a CPU: exact = in --dtype; int8 = rounded by blocks of 32,"
        " which is faster and changes logits; auto = int8 for layers that have a kernel.",
    )
    device: str = Field(
        "cpu",
        description="Torch device of the model, e.g. cpu or cuda:0; cpu,cpu = one rank on each, as with"
        " --tensor-parallel 2.",
    )
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Processes that share the model's layers, each with --threads; tokens do not depend on it.",
    )
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a forward; default: torch's choice.")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="Compile the model's step; off = eager. auto = compile if possible."
    )
    num_pages: int | None = Field(None, ge=1, description="KV pages; default: what --kv-memory-bytes holds.")
    kv_memory_bytes: int | None = Field(
        None,
        ge=1 << 20,
        description="Memory for KV pages, bytes; default: 1 GiB or for --max-context, on a GPU --kv-memory-fraction.",
    )
    prefix_caching: bool = Field(
        True, description="Keep the KV of full pages until their memory is needed, for prompts that begin alike."
    )
    snapshot_memory_bytes: int = Field(
        512 << 20,
        ge=0,
        description="Memory for snapshots of recurrent states, bytes: a model that has them finds prompts that begin"
        " alike by these; 0 = none.",
    )
    max_sequences: int = Field(64, ge=1, le=4096, description="Sequences held open at once; more are refused.")
    max_links: int = Field(64, ge=1, le=4096, description="Routers connected at once; more are refused.")
    max_draft_tokens: int = Field(16, ge=1, le=512, description="Most draft tokens of one block.")
    max_num_batched_tokens: int = Field(256, ge=2, le=16384, description="Maximum number of tokens in one forward.")
    batch_invariant: bool = Field(
        True, description="On a GPU: products that do not depend on the batch; false = cuBLAS, and tokens that do."
    )
    max_prefill_tokens: int | None = Field(
        None,
        ge=1,
        le=16384,
        description="Maximum number of prompt tokens in a forward while other sequences are active; "
        "default: 64, on a verify worker more if they hardly lengthen it.",
    )
    watchdog_timeout_s: float = Field(
        300.0,
        ge=0.1,
        le=86400,
        description="Longest step of a model, seconds; a worker that hangs for so long ends with status 1, for its"
        " supervisor to start again.",
    )
    worker_id: str = Field(
        "", description="Name of this worker in logs, traces and metrics; default: made from role, host and pid."
    )
    cache_dir: Path | None = Field(
        None, description="Folder for compiled code and packed weights; default: the user's cache directory."
    )
    synthetic: str = Field(
        "",
        description="Simulate a model: step_ms=20 link_ms=0.2 acceptance=0.8 hit_rate=0.7, all but the first optional."
        " A forward takes step_ms, or a time by tokens (1:20,8:22); the last two are for draft workers. Outputs are"
        " labelled. Default: a real model.",
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank."""
        return rank_devices(self.device, self.tensor_parallel)

    @property
    def rank_logging(self) -> Callable[[], None]:
        """Sets up the log of another rank's process, which repeats rank 0's work: warnings and errors."""
        return partial(configure_logging, "error" if self.log_level == "error" else "warning", self.log_format)

    def numbers_of_ranks(self) -> dict[str, int]:
        """Options that divide a model among ranks."""
        return {"tensor-parallel": self.tensor_parallel}

    def one_process_options(self) -> dict[str, bool]:
        """Options that ranks do not support, and whether they are set."""
        return {"--synthetic": bool(self.synthetic), "--no-batch-invariant": not self.batch_invariant}

    @property
    def simulation(self) -> Simulation | None:
        """Simulation instead of a model; None for a real model."""
        return Simulation.parse(self.synthetic) if self.synthetic else None

    @property
    def one_way_delay_s(self) -> float:
        """Delay of a frame on the simulated link, seconds."""
        return self.simulation.link_ms / 2e3 if self.simulation is not None else 0.0

    @field_validator("synthetic")
    @classmethod
    def _check_synthetic(cls, value: str) -> str:
        if value:
            Simulation.parse(value)
        return value

    @field_validator("worker_id")
    @classmethod
    def _check_worker_id(cls, value: str) -> str:
        value.encode()  # raises for what no message takes, such as an argument that is not UTF-8
        return value

    @property
    def instance_id(self) -> str:
        return self.worker_id

    def engine_options(self) -> dict[str, Any]:
        """The keyword arguments of `betoken.engine.config.EngineConfig`."""
        others = {"device": self.devices[0], "num_threads": self.threads, "reuse_self_check": True}
        return {name: getattr(self, name) for name in _ENGINE_FIELDS} | others

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if len(self.devices) > 1 and (bad := [name for name, is_set in self.one_process_options().items() if is_set]):
            counts = self.numbers_of_ranks()
            option = next((name for name, count in counts.items() if count > 1), "device")
            value, limit = (counts[option], "1") if option in counts else (repr(self.device), "one device")
            raise ValueError(f"--{option} = {value}: must be {limit} with {bad[0]}")
        return self
