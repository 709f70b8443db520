"""Options of n-gram lookup."""

from typing import Self

from pydantic import BaseModel, Field, model_validator


class NgramOptions(BaseModel):
    """How to look up where a request says nothing else."""

    min_ngram: int = Field(1, ge=1, le=1024, description="Shortest match `ngram` drafts from, tokens.")
    max_ngram: int = Field(0, ge=0, le=1024, description="Longest match `ngram` looks for, tokens; 0 = any.")
    max_branches: int = Field(4, ge=1, le=16, description="Children per node of an n-gram tree; 1 = chains.")
    draft_factor: int = Field(
        4, ge=0, le=512, description="Longest n-gram draft, in lengths of its match; 0 = no limit."
    )

    @model_validator(mode="after")
    def _check_ngrams(self) -> Self:
        if self.max_ngram and self.min_ngram > self.max_ngram:
            raise ValueError(f"--min-ngram = {self.min_ngram}: must be at most --max-ngram = {self.max_ngram}")
        return self
