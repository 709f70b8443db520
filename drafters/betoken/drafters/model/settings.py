"""Settings of drafters that grow trees with a model."""

from dataclasses import dataclass

from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class ModelSettings(SequenceSettings):
    """How a model drafts."""

    max_branches: int = setting(
        1, "Children per node of a tree of `model` or `early_exit`; 1 = chains.", 1, 16, option="model_branches"
    )
    max_depth: int = setting(
        0,
        "Ids on the longest path of a tree of `model` or `early_exit`; 0 = its number of nodes.",
        0,
        512,
    )
