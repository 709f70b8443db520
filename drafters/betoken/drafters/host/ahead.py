"""Steps of drafters that draft ahead, one forward of each; a drafter that fails is reported by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from betoken.drafters.drafter import AheadDrafter, Drafter

logger = logging.getLogger(__name__)


def has_ahead_work(drafter: Drafter) -> bool:
    """Whether a drafter can draft ahead; if it fails to say so, `step_ahead` fails, too."""
    try:
        return bool(getattr(drafter, "has_ahead_work", False))
    except Exception:
        return True


def step_ahead(drafters: Mapping[str, Drafter]) -> list[str]:
    """Let every drafter that can draft ahead run one forward; return the names of the failed ones."""
    failed = []
    for name, drafter in drafters.items():
        try:
            if getattr(drafter, "has_ahead_work", False):
                cast(AheadDrafter, drafter).step_ahead()
        except Exception:
            logger.exception("drafter %s failed", name)
            failed.append(name)
    return failed
