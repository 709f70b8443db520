"""Options of the drafter that runs the target's first layers."""

from pydantic import BaseModel, Field


class EarlyExitOptions(BaseModel):
    """Which layers of which model draft."""

    early_exit_model: str = Field(
        "", description="Target model, of whose first layers `early_exit` makes a drafter: a directory, or a hub id."
    )
    early_exit_layers: int = Field(2, ge=1, le=1024, description="How many of its layers `early_exit` runs.")
