"""What a draft worker can be told."""

from typing import Self

from pydantic import Field, model_validator

from foretoken.draft_worker.plugin import is_plugin_path
from foretoken.rpc.settings import CommaSeparated
from foretoken.rpc.worker_settings import WorkerSettings

BUILT_IN_DRAFTERS = ("model", "ngram", "early_exit", "staged", "fused")
_DEFAULT_DRAFTERS = ("model", "ngram")


class DraftWorkerSettings(WorkerSettings):
    """Options of `foretoken draft-worker`."""

    drafters: CommaSeparated = Field(
        _DEFAULT_DRAFTERS,
        description=f"Drafters hosted, the default first: {', '.join(BUILT_IN_DRAFTERS)}, or package.module:Class.",
    )
    model: str = Field(
        "", description="Draft model: a directory in Hugging Face format, or a hub id; for model, staged."
    )
    early_exit_model: str = Field(
        "", description="Target model, of whose first layers `early_exit` makes a drafter: a directory, or a hub id."
    )
    early_exit_layers: int = Field(2, ge=1, le=1024, description="How many of its layers `early_exit` runs.")
    model_branches: int = Field(
        1, ge=1, le=16, description="Children per node of a tree of `model` or `early_exit`; 1 = chains."
    )
    model_depth: int = Field(
        0, ge=0, le=512, description="Ids on the longest path of such a tree; 0 = as many as its nodes."
    )
    kv_memory_bytes: int = Field(256 << 20, ge=1 << 20, description="Memory for KV pages, bytes.")
    min_ngram: int = Field(1, ge=1, le=1024, description="Shortest match `ngram` drafts from, tokens.")
    max_ngram: int = Field(0, ge=0, le=1024, description="Longest match `ngram` looks for, tokens; 0 = any.")
    max_branches: int = Field(4, ge=1, le=16, description="Children per node of an n-gram tree; 1 = chains.")
    draft_factor: int = Field(
        4, ge=0, le=512, description="An n-gram draft is at most so many times as long as its match; 0 = no limit."
    )

    @model_validator(mode="after")
    def _check_drafters(self) -> Self:
        for name in self.drafters:
            if name not in BUILT_IN_DRAFTERS and not is_plugin_path(name):
                known = ", ".join(BUILT_IN_DRAFTERS)
                raise ValueError(f"--drafters = {name!r}: must be among {known}, or a path package.module:Class")
        if not self.drafters or len(set(self.drafters)) != len(self.drafters):
            raise ValueError("--drafters: must name at least one drafter, each once")
        for name, option in (("model", "model"), ("staged", "model"), ("early_exit", "early_exit_model")):
            if name in self.drafters and not getattr(self, option):
                raise ValueError(f"--{option.replace('_', '-')}: must be given for the drafter `{name}`")
        if "fused" in self.drafters and len(self.drafters) < 3:
            raise ValueError("--drafters: `fused` chooses among the others, of which there must be two at least")
        if self.max_ngram and self.min_ngram > self.max_ngram:
            raise ValueError(f"--min-ngram = {self.min_ngram}: must be at most --max-ngram = {self.max_ngram}")
        return self
