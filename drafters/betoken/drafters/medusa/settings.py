"""Settings of Medusa heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.medusa.choices import AUTO, Branches, ChoiceTree, Node, parse_paths
from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class MedusaSettings(SequenceSettings):
    """How one sequence drafts with heads."""

    tree: str = setting(AUTO, check=parse_paths)
    """auto = the likeliest nodes, mc_sim_7b_63, or a JSON list of paths of ranks."""
    max_branches: int = setting(10, "Children per node of an auto tree of `medusa`; 1 = chains.", 1, 64)
    max_depth: int = setting(0, lowest=0, highest=32)
    """Ids on a path; 0 = the number of heads."""
    adapter: str = setting("")
    """Heads of --adapter-dir; empty = the worker's own."""

    def override(self, settings: Mapping[str, str]) -> MedusaSettings:
        """See `SequenceSettings`; a tree that is given by paths has no branches to set."""
        new = SequenceSettings.override(self, settings)
        if parse_paths(new.tree) is not None and "max_branches" in settings:
            limit = "must be absent with a tree that is given by paths"
            raise InvalidArgumentError("drafter.settings.max_branches", settings["max_branches"], limit)
        return new

    def choices(self) -> tuple[Node, int]:
        """Drafted continuations of the last committed token, and the number of candidates per head."""
        paths = parse_paths(self.tree)
        if paths is None:
            return Branches(self.max_branches), self.max_branches
        return ChoiceTree(paths), 1 + max(rank for path in paths for rank in path)
