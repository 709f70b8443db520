"""What a verify worker can be told."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from foretoken.engine.config import EngineConfig
from foretoken.rpc.settings import ServiceSettings


class VerifyWorkerSettings(ServiceSettings):
    """Options of `foretoken verify-worker`."""

    model: str = Field(description="Target model: a directory in Hugging Face format, or a hub id.")
    revision: str | None = Field(None, description="Hub revision of the model.")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "bfloat16", description="Type of weights, activations and KV; auto = the checkpoint's own."
    )
    device: str = Field("cpu", description="Torch device of the model, e.g. cpu or cuda:0.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a forward; default: torch's choice.")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="Compile the model's step; off = eager. auto compiles where it can be done."
    )
    num_pages: int | None = Field(None, ge=1, description="KV pages; default: what --kv-memory-bytes holds.")
    kv_memory_bytes: int = Field(1 << 30, ge=1 << 20, description="Memory for KV pages, bytes.")
    page_size: int = Field(16, ge=1, le=1024, description="Slots of a KV page, tokens.")
    max_context: int | None = Field(None, ge=2, description="Longest prompt + output, tokens; default: the model's.")
    max_sequences: int = Field(64, ge=1, le=4096, description="Sequences held open at once; more are refused.")
    max_draft_tokens: int = Field(16, ge=1, le=512, description="Most draft tokens of one block.")
    max_batch_rows: int = Field(256, ge=2, le=16384, description="Most tokens of one forward.")
    max_prefill_rows: int = Field(
        64, ge=1, le=16384, description="Most prompt tokens of a forward while other sequences decode."
    )
    worker_id: str = Field("", description="Name of this worker in logs; default: made from host, port and pid.")
    cache_dir: Path | None = Field(
        None, description="Where compiled code is kept; default: the user's cache directory."
    )

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.max_draft_tokens + 1 > self.max_batch_rows:
            raise ValueError(
                f"--max-draft-tokens = {self.max_draft_tokens}: must be below --max-batch-rows = {self.max_batch_rows}"
            )
        return self

    @property
    def engine(self) -> EngineConfig:
        """The engine's part of the settings."""
        return EngineConfig(
            model=self.model,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            num_threads=self.threads,
            num_pages=self.num_pages,
            kv_memory_bytes=self.kv_memory_bytes,
            max_context=self.max_context,
            page_size=self.page_size,
            max_batch_rows=self.max_batch_rows,
            compile=self.compile,
            cache_dir=self.cache_dir,
        )
