"""Settings of an attached PARD model."""

from dataclasses import dataclass

from betoken.drafters.model.settings import ModelSettings
from betoken.drafters.settings import setting


@dataclass(frozen=True, slots=True)
class PardSettings(ModelSettings):
    """How the model drafts; the worker has no options for it."""

    max_branches: int = setting(1, "Children per node of a tree of `pard`; 1 = chains.", 1, 16)
