"""Steps of drafters that draft ahead, one forward of each; a drafter that fails is reported by name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast

from betoken.drafters.drafter import AheadDrafter, DraftedAhead, Drafter
from betoken.drafters.host.hosted import Answer, HostedSequence, Request
from betoken.rpc.link.worker_load import SequenceKey

logger = logging.getLogger(__name__)


def has_ahead_work(drafter: Drafter) -> bool:
    """Whether a drafter can draft ahead; if it fails to say so, `step_ahead` fails, too."""
    try:
        return bool(getattr(drafter, "has_ahead_work", False))
    except Exception:
        return True


def step_ahead(
    drafters: Mapping[str, Drafter], hosted: Mapping[SequenceKey, HostedSequence]
) -> tuple[list[Answer], list[str]]:
    """Let every drafter that can draft ahead run one forward; return completed drafts and the names of failed ones.

    Drafts of a sequence whose drafter chooses among others are left out: its next draft may be another drafter's.
    """
    answers: list[Answer] = []
    failed = []
    for name, drafter in drafters.items():
        try:
            if getattr(drafter, "has_ahead_work", False):
                drafted = cast(AheadDrafter, drafter).step_ahead()
                answers += [_answer(hosted[one.sequence.key], one) for one in drafted if _is_own(one, hosted)]
        except Exception:
            logger.exception("drafter %s failed", name)
            failed.append(name)
    return answers, failed


def _is_own(drafted: DraftedAhead, hosted: Mapping[SequenceKey, HostedSequence]) -> bool:
    entry = hosted.get(drafted.sequence.key)
    return entry is not None and entry.sequence is drafted.sequence


def _answer(hosted: HostedSequence, drafted: DraftedAhead) -> Answer:
    num_tokens = len(drafted.draft_ids)
    request = Request(num_tokens, num_tokens, key=drafted.key)
    return Answer(hosted, request, drafted.to_drafted(), (drafted.source,), 0, is_ahead=True)
