"""Entries that wait to be written on one link, coalesced into frames of bounded size, within a bounded number of bytes.

Knows protobuf messages; knows no stream and no event loop. Its owner locks, since it is not thread-safe.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from google.protobuf.message import Message

from betoken.common.errors import ResourceExhaustedError

Frame = TypeVar("Frame", bound=Message)

_APPLIED_LAST = "closes"  # a worker applies closes after all other entries of a frame


class BacklogFullError(ResourceExhaustedError):
    """The other side does not read what waits for it."""


@dataclass(frozen=True, slots=True)
class OutboxLimits:
    """How large frames and the backlog of a link may become."""

    max_frame_bytes: int = 1 << 20
    """A frame is closed before it would grow beyond this; a single larger entry travels alone."""
    max_message_bytes: int = 64 << 20
    """Largest frame the other side accepts; a larger entry is refused."""
    max_pending_bytes: int = 64 << 20
    """Largest backlog; beyond it the other side is taken for dead."""


class Outbox(Generic[Frame]):
    """A queue of frames; the last one still grows."""

    def __init__(self, frame_type: type[Frame], limits: OutboxLimits) -> None:
        self._frame_type = frame_type
        self._limits = limits
        self._max_frame_bytes = min(limits.max_frame_bytes, limits.max_message_bytes)
        self._frames: deque[Frame] = deque()
        self._sizes: deque[int] = deque()  # bytes reserved for each frame
        self._tail_has_last_kind = False
        self.num_bytes = 0
        """About the serialised size of all that waits."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._frames

    def add_entries(self, entries: Mapping[str, Iterable[Message]]) -> None:
        """Append entries, field name -> messages of that repeated field.

        Raises:
            ResourceExhaustedError: an entry is too large to send; it and those after it were not appended.
            BacklogFullError: the backlog is full.
        """
        limits, frames, sizes = self._limits, self._frames, self._sizes
        for name, messages in entries.items():
            is_last_kind = name == _APPLIED_LAST
            for message in messages:  # inlined, because it runs twice per round and sequence
                num_bytes = message.ByteSize() + 8  # tag and length
                if num_bytes > limits.max_message_bytes:
                    limit = limits.max_message_bytes
                    raise ResourceExhaustedError(
                        f"an entry of {num_bytes} bytes is above the link's limit of {limit} bytes"
                    )
                if self.num_bytes + num_bytes > limits.max_pending_bytes:
                    raise self._full()
                if (
                    not frames
                    or sizes[-1] + num_bytes > self._max_frame_bytes
                    or (self._tail_has_last_kind and not is_last_kind)
                ):
                    self._push(self._frame_type())
                getattr(frames[-1], name).append(message)
                self._tail_has_last_kind |= is_last_kind
                sizes[-1] += num_bytes
                self.num_bytes += num_bytes

    def add_frame(self, frame: Frame) -> None:
        """Append a whole frame, merged into the waiting one if both fit. The caller transfers ownership of `frame`.

        Raises:
            ResourceExhaustedError, BacklogFullError: as `add_entries`.
        """
        num_bytes = frame.ByteSize()
        if num_bytes > self._max_frame_bytes:
            self._add_piecewise(frame)
            return
        if self.num_bytes + num_bytes > self._limits.max_pending_bytes:
            raise self._full()
        if self._frames and self._sizes[-1] + num_bytes <= self._max_frame_bytes:
            self._merge(self._frames[-1], frame)
        else:
            self._push(frame)
        self._sizes[-1] += num_bytes
        self.num_bytes += num_bytes

    def pop(self) -> Frame | None:
        """The oldest frame, which grows no further; None while it is empty."""
        if not self._frames:
            return None
        self.num_bytes -= self._sizes.popleft()
        return self._frames.popleft()

    def _push(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._sizes.append(0)
        self._tail_has_last_kind = False

    def _full(self) -> BacklogFullError:
        limit = self._limits.max_pending_bytes
        return BacklogFullError(f"the other side does not read: {self.num_bytes} of {limit} bytes wait")

    def _merge(self, tail: Frame, frame: Frame) -> None:
        for descriptor, value in frame.ListFields():
            if descriptor.is_repeated:
                getattr(tail, descriptor.name).extend(value)
            else:  # load, drain: the newest replaces, it is not merged field by field
                getattr(tail, descriptor.name).CopyFrom(value)

    def _add_piecewise(self, frame: Frame) -> None:
        for descriptor, value in frame.ListFields():
            if descriptor.is_repeated:
                self.add_entries({descriptor.name: value})
            else:
                single = self._frame_type()
                getattr(single, descriptor.name).CopyFrom(value)
                self.add_frame(single)
