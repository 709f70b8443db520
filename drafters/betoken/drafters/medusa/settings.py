"""How one sequence drafts with heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.medusa.choices import AUTO, Branches, ChoiceTree, Node, parse_paths
from betoken.drafters.settings import check_names, integer

MAX_BRANCHES = 64


@dataclass(frozen=True, slots=True)
class MedusaSettings:
    """Every field may be set per sequence by its name."""

    tree: str = AUTO
    """`auto`, mc_sim_7b_63, or a JSON list of paths of ranks."""
    max_branches: int = 10
    """Children of a node where the tree is `auto`; 1 = chains."""
    max_depth: int = 0
    """Ids on a path; 0 = as many as there are heads."""
    adapter: str = ""
    """Heads of --adapter-dir; empty = the worker's own."""

    def override(self, settings: Mapping[str, str]) -> MedusaSettings:
        """These settings with a sequence's own.

        Raises:
            InvalidArgumentError: an unknown name, or a value outside its limits.
        """
        check_names(settings, tuple(self.__slots__))
        tree = settings.get("tree", self.tree)
        try:
            paths = parse_paths(tree)
        except ValueError as error:
            raise InvalidArgumentError("drafter.settings.tree", tree, str(error)) from error
        if paths is not None and "max_branches" in settings:
            limit = "must be absent beside a tree that is given by paths"
            raise InvalidArgumentError("drafter.settings.max_branches", settings["max_branches"], limit)
        return MedusaSettings(
            tree,
            integer(settings, "max_branches", self.max_branches, 1, MAX_BRANCHES),
            integer(settings, "max_depth", self.max_depth, 0, 32),
            settings.get("adapter", self.adapter),
        )

    def choices(self) -> tuple[Node, int]:
        """What may follow the last committed token, and how many guesses of a head that takes."""
        paths = parse_paths(self.tree)
        if paths is None:
            return Branches(self.max_branches), self.max_branches
        return ChoiceTree(paths), 1 + max(rank for path in paths for rank in path)
