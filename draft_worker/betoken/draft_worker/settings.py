"""Options of a draft worker, its drafters' included."""

from typing import Literal, Self

from pydantic import Field, model_validator

from betoken.drafters.registry import SPECS, check_drafters, usual_drafters
from betoken.drafters.synthetic import SPEC as SYNTHETIC_SPEC
from betoken.drafters.worker_options import with_drafter_options
from betoken.rpc.settings import CommaSeparated
from betoken.rpc.validation.request import MAX_DRAFTER_NAME_BYTES
from betoken.rpc.worker_settings import WorkerSettings

_AUTO = ("auto",)
SYNTHETIC = SYNTHETIC_SPEC.name
_HOSTED = ", ".join(spec.name for spec in SPECS.values() if spec.can_host)
_USUAL = ", ".join(spec.name for spec in SPECS.values() if spec.is_usual)


DEFAULT_MAX_CONTEXT = 131_072
"""Longest sequence, tokens, unless a model supports more: an n-gram index takes some hundred bytes per token."""


@with_drafter_options(lambda spec: spec.can_host)
class DraftWorkerSettings(WorkerSettings):
    """Options of `betoken draft-worker`."""

    drafters: CommaSeparated = Field(
        _AUTO,
        description=f"Drafters hosted, the default first: {_HOSTED}, or package.module:Class;"
        f" auto = {_USUAL}, except drafters whose model is not given.",
    )
    model: str = Field(
        "",
        description="Draft model: a GGUF file, a directory in Hugging Face format, a hub id, or OWNER/NAME:Q4_K_M, a"
        " GGUF file of the hub.",
    )
    activations: Literal["exact", "int8", "auto"] = Field(
        "auto",
        description="Inputs of quantised linear layers on a CPU: exact = in --dtype; int8 = rounded by blocks of 32,"
        " which is faster and changes drafts; auto = int8 for layers that have a kernel.",
    )
    max_context: int | None = Field(
        None,
        ge=2,
        le=1 << 24,
        description=f"Longest prompt + output drafted for, tokens; default: {DEFAULT_MAX_CONTEXT}, or more if a"
        " hosted model supports more.",
    )
    kv_memory_bytes: int = Field(1 << 30, ge=1 << 20, description="Memory for KV pages of each model, bytes.")

    @property
    def hosted_drafters(self) -> tuple[str, ...]:
        """Names of the drafters to host, the default first."""
        if self.drafters != _AUTO:
            return self.drafters
        return (SYNTHETIC,) if self.synthetic else usual_drafters(self)

    def one_process_options(self) -> dict[str, bool]:
        runs_model = any(SPECS[name].runs_model for name in self.hosted_drafters if name in SPECS)
        return super().one_process_options() | {f"--drafters = {','.join(self.hosted_drafters)}": not runs_model}

    @model_validator(mode="after")
    def _check_drafters(self) -> Self:
        check_drafters(self.hosted_drafters, self)
        if self.synthetic and self.hosted_drafters != (SYNTHETIC,):
            raise ValueError(f"--drafters = {','.join(self.drafters)}: must be {SYNTHETIC} with --synthetic")
        if not self.synthetic and SYNTHETIC in self.hosted_drafters:
            raise ValueError(f"--synthetic: must be given for the drafter `{SYNTHETIC}`")
        for name in self.drafters:
            if len(name.encode()) > MAX_DRAFTER_NAME_BYTES:
                raise ValueError(f"--drafters = {name!r}: must be at most {MAX_DRAFTER_NAME_BYTES} bytes")
        if self.revision is not None and not self.model:
            raise ValueError(f"--revision = {self.revision!r}: belongs to --model, which is not given")
        return self
