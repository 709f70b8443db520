"""Options of drafting with a layer of the EAGLE family."""

from pydantic import BaseModel, Field

MAX_BRANCHES = 16
MAX_DEPTH = 64


class Eagle3Options(BaseModel):
    """The layer, and how it drafts where a request says nothing else."""

    eagle3: str | None = Field(
        None, description="Directory or hub id of the layer of `eagle3`: EAGLE-3, or weights of EAGLE-1 and EAGLE-2."
    )
    eagle3_branches: int = Field(
        8, ge=1, le=MAX_BRANCHES, description="Children per node of a tree of `eagle3`, and nodes a pass; 1 = chains."
    )
    eagle3_depth: int = Field(
        6, ge=1, le=MAX_DEPTH, description="Ids on the longest path of a draft of `eagle3`: passes of its layer."
    )
