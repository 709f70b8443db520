"""`python -m betoken.training RECIPE ...`, which `betoken train` becomes: runs the recipe of that name.

Knows names of recipes only; each has its own options.
"""

from __future__ import annotations

import importlib
import sys

_INTERRUPTED = 130
RECIPES = {
    "draft": "a small model distilled from a target",
    "pard": "a small model that drafts all tokens of a round in one forward",
    "medusa": "Medusa heads",
    "eagle3": "an EAGLE-3 layer",
    "distill-table": "drafts by every divergence on every kind of data, in one table",
    "measure": "tokens a forward with a drafter, on a file of prompts",
    "prompts": "a file of prompts to train with",
}


def main(arguments: list[str] | None = None) -> None:
    """Run one recipe.

    Raises:
        SystemExit: the recipe is unknown or was interrupted.
    """
    name, *further = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name not in RECIPES:
        lines = [f"  {known:14} {what}" for known, what in RECIPES.items()]
        told = "\n".join(["betoken train RECIPE ...; RECIPE --help lists its options", *lines])
        if name in ("--help", "-h"):
            print(told)
            return
        sys.exit(f"betoken train: {name!r} is not a recipe\n{told}")
    try:
        importlib.import_module(f"betoken.training.{name.replace('-', '_')}").main(further)
    except KeyboardInterrupt:  # during imports, which take seconds
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()
