"""Settings of drafting with a layer of the EAGLE family."""

from dataclasses import dataclass

from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class EagleSettings(SequenceSettings):
    """How a layer drafts."""

    max_branches: int = setting(8, "Children per node of a tree of `eagle3`, and nodes a pass; 1 = chains.", 1, 16)
    max_depth: int = setting(6, "Ids on the longest path of a draft of `eagle3`: passes of its layer.", 1, 64)


@dataclass(frozen=True, slots=True)
class ParallelEagleSettings(SequenceSettings):
    """How layers that draft all tokens in one pass draft."""

    max_depth: int = setting(EagleSettings().max_depth, "Ids of a draft of `eagle3` that one pass gives.", 1, 64)
