"""Options of drafters that grow trees with a model."""

from pydantic import BaseModel, Field


class ModelOptions(BaseModel):
    """How a model drafts where a request says nothing else."""

    model_branches: int = Field(
        1, ge=1, le=16, description="Children per node of a tree of `model` or `early_exit`; 1 = chains."
    )
    model_depth: int = Field(
        0, ge=0, le=512, description="Ids on the longest path of such a tree; 0 = as many as its nodes."
    )
