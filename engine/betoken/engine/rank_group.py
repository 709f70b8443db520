"""One process's place among the ranks that share a model, and the exchanges between them.

Ranks form pipeline stages of equal size. Rank 0 belongs to the stage of the last layers, the last rank to the stage of
the first layers. Exchanges move bytes and add nothing, so results do not depend on the backend or the number of ranks.
It knows tensors and numbers, not models or commands.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import BroadcastOptions

from betoken.engine.errors import ModelRefusedError, RankLostError

_FIRST_NUMBERS = 1024
"""Numbers of a message that are sent with its length; a longer message takes a second exchange."""

_numbers = count()
_groups: "WeakValueDictionary[int, RankGroup]" = WeakValueDictionary()
_STATE_TYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Element types of hidden states, by the number that a stage sends."""


class RankGroup:
    """The ranks 0 to `size` - 1, as rank `rank` sees them. All ranks make the same exchanges in the same order."""

    def __init__(
        self,
        rank: int,
        size: int,
        link: Any,
        tensors: Any = None,
        counts: NDArray[np.int64] | None = None,
        explain: Callable[[Exception], str] = lambda error: f"an exchange between ranks failed: {error}",
        columns: "RankGroup | None" = None,
    ) -> None:
        """Args:
        link: backend of torch.distributed for messages.
        tensors: backend for activations; None = `link`.
        counts: exchanges of each rank [size], in memory that all ranks share.
        explain: returns the cause of a failed exchange.
        columns: ranks of this rank's stage; None = all ranks are one stage.
        """
        self.rank, self.size = rank, size
        self.columns = self if columns is None else columns
        """Ranks of the stage, which share the columns of its layers."""
        self.num_stages = size // self.columns.size
        self.stage = self.num_stages - 1 - rank // self.columns.size
        """Number of the stage in the order of the layers."""
        self.state_type: torch.dtype | None = None
        """Element type of the hidden states that the previous stage sends; None before the first."""
        self._has_sent_type = False
        self._sent: deque[tuple[Any, Tensor]] = deque()
        """Messages to the next stage that it may not have taken yet."""
        self._link, self._tensors = link, link if tensors is None else tensors
        self._counts = np.zeros(size, np.int64) if counts is None else counts
        self._explain = explain
        self._gather: Callable[[Tensor, Tensor], None] | None = None
        self._gather_bytes = 0
        self._lost: RankLostError | None = None
        self.on_lost: Callable[[RankLostError], None] = lambda error: None
        """Called when the group is given up."""
        self.number = next(_numbers)  # an operator takes numbers and tensors, not objects
        _groups[self.number] = self

    @property
    def is_last_stage(self) -> bool:
        """Whether the stage has the last layers, as rank 0's."""
        return self.stage == self.num_stages - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "RankGroup":
        """Return the group itself: transformers copies configurations, and with them what its loader is given."""
        return self

    @staticmethod
    def of(number: int) -> "RankGroup":
        """Return the group that has this number in this process."""
        return _groups[number]

    def stack(self, x: Tensor) -> Tensor:
        """Return the tensors of all ranks, which have one shape: [size, ...]."""
        found = x.new_empty((self.size, *x.shape))
        source, out = x.contiguous().view(-1).view(torch.uint8), found.view(-1).view(torch.uint8)
        gather = self._gather
        if gather is not None and len(source) <= self._gather_bytes:
            self._exchange(lambda: gather(source, out))
        else:
            self._exchange(lambda: self._tensors._allgather_base(out, source).wait())
        return found

    def gather_with(self, gather: Callable[[Tensor, Tensor], None], most_bytes: int) -> None:
        """Let `stack` use another gather (bytes [n], out [size * n]) than the backend's for at most so many bytes."""
        self._gather, self._gather_bytes = gather, most_bytes

    def broadcast(self, x: Tensor) -> None:
        """Fill a contiguous `x` with rank 0's."""
        self._broadcast(self._tensors, x.view(-1).view(torch.uint8))

    def send_states(self, x: Tensor) -> None:
        """Send hidden states to the next stage without waiting for it. All later ones have the type of the first."""
        if not self._has_sent_type:
            self._send_to_next(self._link, torch.tensor([_STATE_TYPES.index(x.dtype)]))
            self._has_sent_type = True
        self._send_to_next(self._tensors, x.contiguous().view(-1).view(torch.uint8))
        if self.stage == 0:
            self._counts[self.rank] += 2  # each stage counts one exchange for a batch

    def receive_states(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Wait for the hidden states of the previous stage."""
        previous = self.rank + self.columns.size
        if self.state_type is None:
            number = torch.empty(1, dtype=torch.int64)
            self._exchange(lambda: self._link.recv([number], previous, 0).wait())
            self.state_type = _STATE_TYPES[int(number)]
            self._counts[self.rank] -= 2
        found = torch.empty(tuple(shape), dtype=self.state_type, device=device)
        self._exchange(lambda: self._tensors.recv([found.view(-1).view(torch.uint8)], previous, 0).wait())
        return found

    def send(self, numbers: NDArray[np.int32]) -> None:
        """Send a message to the other ranks."""
        first = np.zeros(_FIRST_NUMBERS, np.int32)
        first[0] = len(numbers)
        head, rest = numbers[: _FIRST_NUMBERS - 1], numbers[_FIRST_NUMBERS - 1 :]
        first[1 : 1 + len(head)] = head
        self._broadcast(self._link, torch.from_numpy(first))
        if len(rest):
            self._broadcast(self._link, torch.from_numpy(np.ascontiguousarray(rest)))

    def receive(self) -> NDArray[np.int32]:
        """Wait for a message of rank 0."""
        first = np.zeros(_FIRST_NUMBERS, np.int32)
        self._broadcast(self._link, torch.from_numpy(first))
        length = int(first[0])
        if length < _FIRST_NUMBERS:
            return first[1 : 1 + length]
        rest = np.zeros(length - _FIRST_NUMBERS + 1, np.int32)
        self._broadcast(self._link, torch.from_numpy(rest))
        return np.concatenate([first[1:], rest])

    def least(self, value: int) -> int:
        """Return the least of all ranks' values."""
        return min(self._values(value))

    def check_equal(self, name: str, texts: Sequence[str]) -> None:
        """Compare texts of a rank with rank 0's.

        Raises:
            ModelRefusedError: they differ.
        """
        own = np.frombuffer("\n".join(texts).encode(), np.uint8).astype(np.int32)
        if self.rank == 0:
            self.send(own)
        theirs = own if self.rank == 0 else self.receive()
        is_equal = np.array_equal(own, theirs)
        differing = [rank for rank, value in enumerate(self._values(int(is_equal))) if not value]
        if differing:
            detail = "" if is_equal else f": {', '.join(texts)}; not {bytes(theirs.astype(np.uint8)).decode()!r}"
            raise ModelRefusedError(f"ranks: {name} of rank {differing[0]} differ from rank 0's{detail}")

    def fail(self, error: Exception) -> RankLostError:
        """Give up the group, whose ranks are at different exchanges; return the error of all later exchanges."""
        if self._lost is None:
            self._lost = (
                error if isinstance(error, RankLostError) else RankLostError(f"{type(error).__name__}: {error}")
            )
            self.on_lost(self._lost)
        return self._lost

    def _send_to_next(self, backend: Any, x: Tensor) -> None:
        """Start to send; tensors are kept until the next stage has taken them.

        Stages have at most as many forwards under way as there are stages, each in as many micro-batches.
        """
        if self._lost is not None:
            raise self._lost
        try:
            if len(self._sent) > self.num_stages**2:
                self._sent.popleft()[0].wait()
            self._sent.append((backend.send([x], self.rank - self.columns.size, 0), x))
        except RuntimeError as error:
            raise self.fail(RankLostError(self._explain(error))) from error

    def _values(self, value: int) -> list[int]:
        found = torch.empty(self.size, dtype=torch.int64)
        own = torch.tensor([value], dtype=torch.int64)
        self._exchange(lambda: self._link._allgather_base(found, own).wait())
        values: list[int] = found.tolist()
        return values

    def _broadcast(self, backend: Any, x: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._exchange(lambda: backend.broadcast([x], options).wait())

    def _exchange(self, run: Callable[[], Any]) -> None:
        if self._lost is not None:
            raise self._lost
        self._counts[self.rank] += 1  # odd within an exchange
        try:
            run()
        except RuntimeError as error:
            raise self.fail(RankLostError(self._explain(error))) from error
        self._counts[self.rank] += 1
