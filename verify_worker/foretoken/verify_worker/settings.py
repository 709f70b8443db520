"""What a verify worker can be told."""

from typing import Self

from pydantic import Field, model_validator

from foretoken.rpc.worker_settings import WorkerSettings


class VerifyWorkerSettings(WorkerSettings):
    """Options of `foretoken verify-worker`."""

    max_context: int | None = Field(None, ge=2, description="Longest prompt + output, tokens; default: the model's.")

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.max_draft_tokens + 2 > self.max_batch_rows:  # a block has one row more; one is left for prompts
            limit = f"must be at least {self.max_draft_tokens + 2} with --max-draft-tokens = {self.max_draft_tokens}"
            raise ValueError(f"--max-batch-rows = {self.max_batch_rows}: {limit}")
        return self
