"""The outbox: what leaves is what went in, in order, in frames of bounded size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from betoken.common.errors import ResourceExhaustedError
from betoken.rpc.link.outbox import BacklogFullError, Outbox, OutboxLimits
from betoken.v1.types_pb2 import CloseSequence, LinkError, OpenSequence
from betoken.v1.verify_pb2 import DraftBlock, VerificationResult, VerifyLinkRequest, VerifyLinkResponse

ENTRY_TYPES = {  # in the order a worker applies them
    "opens": OpenSequence,
    "blocks": DraftBlock,
    "closes": CloseSequence,
}


def drained(outbox: Outbox) -> list:
    frames = []
    while not outbox.is_empty:
        frames.append(outbox.pop())
    return frames


@given(
    st.lists(st.sampled_from(sorted(ENTRY_TYPES)), max_size=60),
    st.integers(20, 300),
)
def test_frames_of_the_outbox_keep_order_and_sizes(names, max_frame_bytes):
    entries = [(name, 2**60 + index) for index, name in enumerate(names)]
    outbox = Outbox(VerifyLinkRequest, OutboxLimits(max_frame_bytes=max_frame_bytes))
    for name, sequence_id in entries:
        outbox.add_entries({name: [ENTRY_TYPES[name](sequence_id=sequence_id)]})
    frames = drained(outbox)
    assert outbox.num_bytes == 0
    for name in ENTRY_TYPES:
        sent = [sequence_id for entry_name, sequence_id in entries if entry_name == name]
        assert [entry.sequence_id for frame in frames for entry in getattr(frame, name)] == sent
    assert all(frame.ByteSize() <= max_frame_bytes for frame in frames)
    # Applied as opens, blocks, closes per frame, nothing overtakes a close.
    applied = [(name, entry.sequence_id) for frame in frames for name in ENTRY_TYPES for entry in getattr(frame, name)]
    for index, (name, _) in enumerate(entries):
        if name == "closes":
            assert set(applied[: applied.index(entries[index])]) >= {e for e in entries[:index] if e[0] != "closes"}


def test_whole_frames_merge_in_the_outbox_and_single_fields_are_replaced():
    outbox = Outbox(VerifyLinkResponse, OutboxLimits())
    for running in (3, 0):
        frame = VerifyLinkResponse(results=[VerificationResult(sequence_id=running + 1)])
        frame.load.running = running
        outbox.add_frame(frame)
    (frame,) = drained(outbox)
    assert [result.sequence_id for result in frame.results] == [4, 1]
    assert frame.load.running == 0


def test_a_whole_frame_too_large_is_split():
    outbox = Outbox(VerifyLinkResponse, OutboxLimits(max_frame_bytes=100))
    frame = VerifyLinkResponse(results=[VerificationResult(sequence_id=2**60 + i, base_length=1000) for i in range(50)])
    frame.load.free_pages = 5
    outbox.add_frame(frame)
    frames = drained(outbox)
    assert len(frames) > 5
    assert [result.sequence_id - 2**60 for part in frames for result in part.results] == list(range(50))
    assert frames[-1].load.free_pages == 5


def test_no_frame_is_larger_than_a_message_may_be():
    outbox = Outbox(VerifyLinkResponse, OutboxLimits(max_message_bytes=100))
    outbox.add_entries({"errors": [LinkError(message="x" * 40) for _ in range(5)]})
    frames = drained(outbox)
    assert sum(len(frame.errors) for frame in frames) == 5 and max(frame.ByteSize() for frame in frames) <= 100


def test_entries_beyond_the_limits_of_the_outbox_are_rejected():
    outbox = Outbox(VerifyLinkResponse, OutboxLimits(max_frame_bytes=50, max_message_bytes=100, max_pending_bytes=150))
    with pytest.raises(ResourceExhaustedError, match="limit of 100 bytes"):
        outbox.add_entries({"errors": [LinkError(message="x" * 200)]})
    assert outbox.is_empty
    outbox.add_entries({"errors": [LinkError(message="x" * 80)]})
    with pytest.raises(BacklogFullError, match="does not read"):
        outbox.add_entries({"errors": [LinkError(message="x" * 80)]})
    outbox.pop()
    outbox.add_entries({"errors": [LinkError(message="x" * 80)]})
