"""What a draft worker can be told."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from foretoken.engine.config import EngineConfig
from foretoken.rpc.settings import CommaSeparated, ServiceSettings

KNOWN_DRAFTERS = ("model", "ngram")


class DraftWorkerSettings(ServiceSettings):
    """Options of `foretoken draft-worker`."""

    drafters: CommaSeparated = Field(
        ("model", "ngram"), description="Drafters hosted, the first is the default: model, ngram."
    )
    model: str = Field("", description="Draft model: a directory in Hugging Face format, or a hub id; for `model`.")
    revision: str | None = Field(None, description="Hub revision of the model.")
    dtype: Literal["bfloat16", "float16", "float32", "auto"] = Field(
        "bfloat16", description="Type of weights, activations and KV; auto = the checkpoint's own."
    )
    device: str = Field("cpu", description="Torch device of the model, e.g. cpu or cuda:1.")
    threads: int | None = Field(None, ge=1, le=1024, description="CPU threads of a forward; default: torch's choice.")
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="Compile the model's step; off = eager. auto compiles where it can be done."
    )
    num_pages: int | None = Field(None, ge=1, description="KV pages; default: what --kv-memory-bytes holds.")
    kv_memory_bytes: int = Field(256 << 20, ge=1 << 20, description="Memory for KV pages, bytes.")
    page_size: int = Field(16, ge=1, le=1024, description="Slots of a KV page, tokens.")
    max_sequences: int = Field(64, ge=1, le=4096, description="Sequences held open at once; more are refused.")
    max_draft_tokens: int = Field(16, ge=1, le=512, description="Most draft tokens of one block.")
    max_batch_rows: int = Field(256, ge=2, le=16384, description="Most tokens of one forward.")
    max_prefill_rows: int = Field(
        64, ge=1, le=16384, description="Most prompt tokens of a forward while other sequences draft."
    )
    min_ngram: int = Field(1, ge=1, le=16, description="Shortest n-gram that is looked up, tokens.")
    max_ngram: int = Field(4, ge=1, le=16, description="Longest n-gram that is looked up, tokens.")
    worker_id: str = Field("", description="Name of this worker in logs; default: made from host, port and pid.")
    cache_dir: Path | None = Field(
        None, description="Where compiled code is kept; default: the user's cache directory."
    )

    @model_validator(mode="after")
    def _check_drafters(self) -> Self:
        for name in self.drafters:
            if name not in KNOWN_DRAFTERS:
                raise ValueError(f"--drafters = {name!r}: must be among {', '.join(KNOWN_DRAFTERS)}")
        if not self.drafters or len(set(self.drafters)) != len(self.drafters):
            raise ValueError("--drafters: must name at least one drafter, each once")
        if "model" in self.drafters and not self.model:
            raise ValueError("--model: must be given for the drafter `model`")
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"--min-ngram = {self.min_ngram}: must be at most --max-ngram = {self.max_ngram}")
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
            page_size=self.page_size,
            max_batch_rows=self.max_batch_rows,
            compile=self.compile,
            cache_dir=self.cache_dir,
        )
