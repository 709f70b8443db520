"""Protocol messages as dataclasses of the SDK."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from betoken.client.from_message import from_message
from betoken.v1 import generation_pb2 as pb


@dataclass
class Stats:
    num_drafts: int
    round_s: float
    num_accepted_per_position: tuple[int, ...]
    num_failed_drafts_by_reason: dict[str, int]
    note: str = ""


def test_fields_of_a_message_are_read_by_name_with_seconds_lists_and_maps() -> None:
    message = pb.SpeculationStats(num_drafts=3, round_ns=1_500_000_000, num_accepted_per_position=[2, 1])
    message.num_failed_drafts_by_reason["lost"] = 4
    assert from_message(Stats, message, note="n") == Stats(3, 1.5, (2, 1), {"lost": 4}, "n")


def test_a_dataclass_field_without_a_message_field_is_rejected_by_name() -> None:
    with pytest.raises(TypeError, match=r"Stats\.note: SpeculationStats lacks it"):
        from_message(Stats, pb.SpeculationStats())
