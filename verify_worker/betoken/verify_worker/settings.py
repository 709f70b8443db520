"""Options of a verify worker, its attached drafters' included."""

from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from betoken.drafters.registry import BUILT_IN, SPECS, attached_names, check_attached
from betoken.drafters.worker_options import with_drafter_options
from betoken.rpc.rank_devices import MAX_RANKS, rank_devices
from betoken.rpc.settings import CommaSeparated
from betoken.rpc.worker_settings import WorkerSettings

_ATTACHABLE = ", ".join(spec.name for spec in SPECS.values() if spec.can_attach)


@with_drafter_options(lambda spec: spec.can_attach)
class VerifyWorkerSettings(WorkerSettings):
    """Options of `betoken verify-worker`."""

    attached_drafters: Annotated[CommaSeparated, AfterValidator(attached_names)] = Field(
        (BUILT_IN,),
        description=f"Drafters that propose here, between two forwards, among {_ATTACHABLE}; {BUILT_IN} = those whose"
        " weights the model's checkpoint holds (mtp), if any; none = no drafters.",
    )

    kv_memory_fraction: float = Field(
        0.9, gt=0, le=1, description="On a GPU: part of the memory that the largest forward leaves which KV takes."
    )
    pipeline: int = Field(
        1,
        ge=1,
        le=MAX_RANKS,
        description="Stages of consecutive layers, each with --tensor-parallel processes; tokens do not depend on it.",
    )
    max_context: int | None = Field(
        None, ge=2, description="Longest prompt + output, tokens; default: the model's, or what the KV pages hold."
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """Device of each rank of all stages."""
        return rank_devices(self.device, self.tensor_parallel, self.pipeline)

    @property
    def tensor_parallel_degree(self) -> int:
        """Ranks of a stage."""
        return len(self.devices) // self.pipeline

    def numbers_of_ranks(self) -> dict[str, int]:
        return {"pipeline": self.pipeline} | super().numbers_of_ranks()

    def one_process_options(self) -> dict[str, bool]:
        found = super().one_process_options()
        for spec in (SPECS[name] for name in self.attached_drafters if name != BUILT_IN):
            found[f"--attached-drafters {spec.name}"] = spec.reads_target_kv
        return found

    def engine_options(self) -> dict[str, Any]:
        return super().engine_options() | {
            "kv_memory_fraction": self.kv_memory_fraction,
            "max_context": self.max_context,
        }

    @model_validator(mode="after")
    def _check_attached(self) -> Self:
        check_attached(self.attached_drafters, self)
        named = [SPECS[name] for name in self.attached_drafters if name != BUILT_IN]
        if self.synthetic and (readers := [spec.name for spec in named if spec.needs_features]):
            limit = "reads hidden states, which a synthetic target has none of (--synthetic)"
            raise ValueError(f"--attached-drafters = {readers[0]!r}: {limit}")
        return self

    @model_validator(mode="after")
    def _check_simulation(self) -> Self:
        of_drafts = [name for name in ("acceptance", "hit_rate") if f"{name}=" in self.synthetic]
        if of_drafts:
            raise ValueError(f"--synthetic: {of_drafts[0]} is a draft worker's")
        return self

    @model_validator(mode="after")
    def _check_rows(self) -> Self:
        if self.max_draft_tokens + 2 > self.max_num_batched_tokens:  # a block has one row more; one is left for prompts
            limit = f"must be at least {self.max_draft_tokens + 2} with --max-draft-tokens = {self.max_draft_tokens}"
            raise ValueError(f"--max-num-batched-tokens = {self.max_num_batched_tokens}: {limit}")
        return self
