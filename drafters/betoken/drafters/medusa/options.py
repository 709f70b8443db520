"""Options of Medusa heads."""

from pathlib import Path
from typing import Self

from pydantic import BaseModel, Field, field_validator, model_validator

from betoken.drafters.medusa.choices import parse_paths


class MedusaOptions(BaseModel):
    """Heads, adapters and trees where a request says nothing else."""

    medusa: Path | None = Field(
        None,
        description="Directory of the heads that `medusa` drafts with; default: those in the target's own checkpoint,"
        " if it holds some.",
    )
    adapter_dir: Path | None = Field(
        None, description="Folder of further heads; a request names one by its directory's name; default: none."
    )
    max_adapters: int = Field(4, ge=1, le=1024, description="Most adapters in memory; the least recently used goes.")
    medusa_tree: str = Field(
        "auto",
        description="Tree of `medusa`: auto = the likeliest nodes, mc_sim_7b_63, or a JSON list of paths of ranks.",
    )
    medusa_branches: int = Field(
        10, ge=1, le=64, description="Children per node of an auto tree of `medusa`; 1 = chains."
    )

    @field_validator("medusa_tree")
    @classmethod
    def _check_tree(cls, value: str) -> str:
        parse_paths(value)
        return value

    @model_validator(mode="after")
    def _check_adapter_dir(self) -> Self:
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise ValueError(f"--adapter-dir = {self.adapter_dir}: must be a directory")
        return self
