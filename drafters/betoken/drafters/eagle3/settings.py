"""Settings of drafting with a layer of the EAGLE family."""

from dataclasses import dataclass

from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class EagleSettings(SequenceSettings):
    """How a layer drafts."""

    max_branches: int = setting(8, "Children per node of a tree of `eagle3`, and nodes a pass; 1 = chains.", 1, 16)
    max_depth: int = setting(6, "Ids on the longest path of a draft of `eagle3`: passes of its layer.", 1, 64)
