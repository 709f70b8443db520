"""Names of drafters in benchmarks: `ngram@attached` is the attached one of two of a name.

Pure data; knows the registry.
"""

from betoken.drafters.registry import SPECS

ATTACHED_SUFFIX = "@attached"
ATTACHABLE = tuple(name + ATTACHED_SUFFIX if spec.can_host else name for name, spec in SPECS.items() if spec.can_attach)
"""Names of the drafters that a verify worker can run."""


def drafter_named(name: str) -> tuple[str, bool]:
    """A drafter's own name, and whether it is the verify worker that runs it.

    Raises:
        ValueError: no verify worker can attach it.
    """
    own = name.removesuffix(ATTACHED_SUFFIX)
    is_attached = name in ATTACHABLE
    if own != name and not is_attached:
        raise ValueError(f"{name}: must be among {', '.join(ATTACHABLE)}")
    return own, is_attached
