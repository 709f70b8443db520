"""What a draft worker can be told."""

from typing import Self

from pydantic import Field, model_validator

from betoken.drafters.lookahead.settings import MAX_GUESSES, MAX_NGRAM_SIZE, MAX_STEPS, MAX_WINDOW
from betoken.drafters.plugin import is_plugin_path
from betoken.rpc.settings import CommaSeparated
from betoken.rpc.validation.request import MAX_DRAFTER_NAME_BYTES
from betoken.rpc.worker_settings import WorkerSettings

BUILT_IN_DRAFTERS = ("model", "ngram", "lookahead", "early_exit", "staged", "fused")
_DEFAULT_DRAFTERS = ("fused", "model", "ngram", "staged")
_NEEDED = {
    "model": ("model",),
    "staged": ("model",),
    "early_exit": ("early_exit_model",),
    "lookahead": ("lookahead_model", "model"),
}
"""Options of which a drafter needs one."""
MODEL_DRAFTERS = frozenset(_NEEDED)
"""Drafters that run a model."""


DEFAULT_MAX_CONTEXT = 131_072
"""Of a worker whose models hold less, or that has none: an n-gram index takes some hundred bytes a token."""


class DraftWorkerSettings(WorkerSettings):
    """Options of `betoken draft-worker`."""

    drafters: CommaSeparated = Field(
        _DEFAULT_DRAFTERS,
        description=f"Drafters hosted, the default first: {', '.join(BUILT_IN_DRAFTERS)}, or package.module:Class.",
    )
    model: str = Field(
        "", description="Draft model: a directory in Hugging Face format, or a hub id; for model, staged, lookahead."
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
    lookahead_model: str = Field(
        "", description="Model that `lookahead` iterates: a directory, or a hub id; default: --model."
    )
    lookahead_window: int = Field(15, ge=2, le=MAX_WINDOW, description="W of `lookahead`: columns of its window.")
    lookahead_ngram_size: int = Field(5, ge=2, le=MAX_NGRAM_SIZE, description="N of `lookahead`: tokens of an n-gram.")
    lookahead_guesses: int = Field(15, ge=1, le=MAX_GUESSES, description="G of `lookahead`: most guesses per token.")
    lookahead_steps: int = Field(1, ge=1, le=MAX_STEPS, description="Most steps of `lookahead` after each draft.")
    lookahead_seed_from_prompt: bool = Field(
        False, description="Pool the n-grams of the text itself too, prompt and committed output."
    )
    max_context: int | None = Field(
        None,
        ge=2,
        le=1 << 24,
        description=f"Longest prompt + output drafted for, tokens; default: {DEFAULT_MAX_CONTEXT}, or more where a"
        " hosted model holds that.",
    )
    kv_memory_bytes: int = Field(1 << 30, ge=1 << 20, description="Memory for KV pages of each model, bytes.")
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
            if len(name.encode()) > MAX_DRAFTER_NAME_BYTES:
                raise ValueError(f"--drafters = {name!r}: must be at most {MAX_DRAFTER_NAME_BYTES} bytes")
        if not self.drafters or len(set(self.drafters)) != len(self.drafters):
            raise ValueError("--drafters: must name at least one drafter, each once")
        if self.revision is not None and not self.model:
            raise ValueError(f"--revision = {self.revision!r}: is that of --model, which is not given")
        for name, options in _NEEDED.items():
            if name in self.drafters and not any(getattr(self, option) for option in options):
                known = " or ".join(f"--{option.replace('_', '-')}" for option in options)
                raise ValueError(f"{known}: must be given for the drafter `{name}`")
        if "fused" in self.drafters and len(self.drafters) < 3:
            raise ValueError("--drafters: `fused` chooses among the others, of which there must be two at least")
        num_rows = self.lookahead_window * (self.lookahead_ngram_size - 1)
        if "lookahead" in self.drafters and num_rows > self.max_batch_rows:
            shape = f"--lookahead-ngram-size = {self.lookahead_ngram_size}"
            limit = f"{num_rows} rows of a window exceed --max-batch-rows = {self.max_batch_rows}"
            raise ValueError(f"--lookahead-window = {self.lookahead_window} with {shape}: {limit}")
        if self.max_ngram and self.min_ngram > self.max_ngram:
            raise ValueError(f"--min-ngram = {self.min_ngram}: must be at most --max-ngram = {self.max_ngram}")
        return self
