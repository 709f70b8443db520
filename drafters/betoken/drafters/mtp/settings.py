"""Settings of drafting with the MTP layers of the target's checkpoint."""

from dataclasses import dataclass

from betoken.drafters.eagle3.settings import EagleSettings
from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class MtpSettings(EagleSettings):
    """Shape of the drafts. The layer was trained for the first token; its output stands for the next state."""

    max_branches: int = setting(1, "Children per node of a tree of `mtp`, and nodes a pass; 1 = chains.", 1, 16)
    max_depth: int = setting(4, "Ids on the longest path of a draft of `mtp`: passes of its layer.", 1, 64)


@dataclass(frozen=True, slots=True)
class ChainedMtpSettings(SequenceSettings):
    """Length of the drafts of several layers, each of which was trained for one token."""

    max_depth: int = setting(4, "Ids of a draft of `mtp`, at most one for each layer.", 1, 64)
