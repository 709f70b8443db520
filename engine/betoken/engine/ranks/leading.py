"""Rank 0's forward of a model that ranks share: every call is made by all ranks together.

An error after a call was announced leaves the ranks at different exchanges, so it ends the group.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
import transformers
from torch import Tensor

from betoken.engine.batch import Batch
from betoken.engine.custom_operator import define_operator
from betoken.engine.errors import RankLostError
from betoken.engine.forward import Forward, StepOutput
from betoken.engine.model_info import ModelInfo
from betoken.engine.parts import ModelParts
from betoken.engine.rank_group import RankGroup
from betoken.engine.ranks import micro_batches
from betoken.engine.ranks.commands import Command, Numbers, pack, pack_batch, pack_copies, pack_paths
from betoken.engine.snapshots import StateCopy
from betoken.engine.step import StepContext
from betoken.engine.tree import KeptPath
from betoken.engine.weights.activations import exact_rows

_ResultT = TypeVar("_ResultT")
_numbers = count()
_leading: "WeakValueDictionary[int, LeadingParts]" = WeakValueDictionary()


@contextmanager
def all_ranks(group: RankGroup, message: Numbers) -> Iterator[None]:
    """Announce what the block does, so that the other ranks do it, too.

    Raises:
        RankLostError: the block or an exchange failed.
    """
    group.send(message)
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        raise group.fail(error) from error


@contextmanager
def exact_rows_of_all(model: Any, group: RankGroup | None) -> Iterator[None]:
    """Let layers that round their rows multiply them exactly meanwhile, on all ranks."""
    with exact_rows(model):
        if group is not None:
            group.send(pack(Command.EXACT_ROWS, [True]))
        yield
        if group is not None:
            group.send(pack(Command.EXACT_ROWS, [False]))


def agree(group: RankGroup, info: ModelInfo, forward: Forward) -> None:
    """Compare the model and the arithmetic of all ranks.

    Raises:
        ModelRefusedError: they differ.
    """
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    group.check_equal("weights or arithmetic", [info.weights_fingerprint, info.dtype, forward.name, versions])


class LeadingForward:
    """A `Forward` that the other ranks follow."""

    def __init__(self, forward: Forward, group: RankGroup, vocab_size: int) -> None:
        self._forward, self._group = forward, group
        self._announced: deque[tuple[Batch | None, Callable[[], StepOutput | None]]] = deque()
        """Calls of other ranks that this rank has still to make, in their order, and the batches that they run."""
        self._done: deque[tuple[Batch, StepOutput]] = deque()
        """Results of batches that have not been finished."""
        # A stage of one rank has these parts for itself.
        is_shared = group.columns.size > 1 or group.num_stages == 1
        self.parts: ModelParts = (
            LeadingParts(forward.parts, group, vocab_size, self._catch_up) if is_shared else forward.parts
        )
        """See `Forward`."""

    @property
    def name(self) -> str:
        """See `Forward`; the number of ranks changes no bits."""
        return self._forward.name

    @property
    def step(self) -> StepContext:
        """See `Forward`."""
        return self._forward.step

    @property
    def state_bytes(self) -> int:
        """See `Forward`."""
        return self._forward.state_bytes

    @property
    def is_compiled(self) -> bool:
        """See `Forward`."""
        return self._forward.is_compiled

    @property
    def can_compile(self) -> bool:
        """See `Forward`."""
        return self._forward.can_compile

    @property
    def timed_rows(self) -> Sequence[int]:
        """See `Forward`."""
        return self._forward.timed_rows

    def __call__(self, batch: Batch) -> StepOutput:
        """See `Forward`."""
        self.begin(batch)
        return self.finish(batch)

    def begin(self, batch: Batch) -> None:
        """Let the other ranks run a batch; this rank runs it in `finish`, after the batches begun before."""
        self._group.send(pack_batch(batch))
        self._announced.append((batch, partial(micro_batches.run, self._forward, batch, self._group)))

    def finish(self, batch: Batch) -> StepOutput:
        """Run the oldest batch begun, after the calls announced before it."""
        found = self._done.popleft() if self._done else self._run_next()
        assert found is not None and found[0] is batch, "batches finish in the order of their beginning"
        return found[1]

    def _run_next(self) -> tuple[Batch, StepOutput] | None:
        """Make the calls announced up to the next batch; return it and its results."""
        while self._announced:
            batch, call = self._announced.popleft()
            output = self._call(call)
            if batch is not None and output is not None:
                return batch, output
        return None

    def _catch_up(self) -> None:
        """Make all calls that the other ranks make before a call announced now."""
        while (found := self._run_next()) is not None:
            self._done.append((found[0], found[1].copy()))

    def compact(self, paths: Sequence[KeptPath]) -> None:
        """See `Forward`."""
        self._announce(pack_paths(paths), partial(self._forward.compact, paths))

    def copy_states(self, copies: Sequence[StateCopy]) -> None:
        """See `Forward`."""
        self._announce(pack_copies(copies), partial(self._forward.copy_states, copies))

    def _announce(self, message: Numbers, call: Callable[[], None]) -> None:
        """Let all ranks make a call, after the batches that are begun."""
        self._group.send(message)
        if self._announced:
            self._announced.append((None, call))
        else:
            self._call(call)

    def _call(self, call: Callable[[], _ResultT]) -> _ResultT:
        try:
            return call()
        except RankLostError:
            raise
        except Exception as error:
            raise self._group.fail(error) from error

    def compile(self, cache_dir: Path) -> None:
        """See `Forward`; all ranks run compiled functions, or none does."""
        self._group.send(pack(Command.COMPILE))
        reason: Exception | None = None
        try:
            self._forward.compile(cache_dir)
        except Exception as error:  # tracer and compiler raise many types
            reason = error
        if not self._group.least(reason is None):
            self._forward.run_eagerly()
            raise reason or RuntimeError("another rank could not compile the model")

    def run_eagerly(self) -> None:
        """See `Forward`."""
        with all_ranks(self._group, pack(Command.RUN_EAGERLY)):
            self._forward.run_eagerly()


class LeadingParts(ModelParts):
    """The parts of a model that ranks share: output layer and embedding run on all ranks.

    Both are operators, so that a compiled draft layer calls them, too.
    """

    def __init__(self, own: ModelParts, group: RankGroup, vocab_size: int, catch_up: Callable[[], None]) -> None:
        """`catch_up`: makes the calls that other ranks make before the next announced one."""
        super().__init__(own._model, own._make_linear, own.rows_alone)
        self.pool = own.pool
        self._own, self._group, self._vocab_size = own, group, vocab_size
        self.catch_up = catch_up
        self._number = next(_numbers)
        _leading[self._number] = self

    def head(self, states: Tensor) -> Tensor:
        """See `ModelParts`."""
        found: Tensor = torch.ops.betoken_ranks.head(states, self._number, self._vocab_size)
        return found

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `ModelParts`."""
        found: Tensor = torch.ops.betoken_ranks.embed(token_ids, self._number, self.hidden_size, self.dtype)
        return found

    def run_head(self, states: Tensor) -> Tensor:
        """Run the output layer on all ranks."""
        self.catch_up()
        with all_ranks(self._group, pack(Command.HEAD, states.shape)):
            states = states.contiguous()
            self._group.columns.broadcast(states)
            return self._own.head(states)

    def run_embedding(self, token_ids: Tensor) -> Tensor:
        """Look embeddings up on all ranks."""
        self.catch_up()
        with all_ranks(self._group, pack(Command.EMBED, token_ids.shape)):
            token_ids = token_ids.contiguous()
            self._group.columns.broadcast(token_ids)
            return self._own.embed(token_ids)


def _head(states: Tensor, number: int, width: int) -> Tensor:
    return _leading[number].run_head(states)


def _head_shape(states: Tensor, number: int, width: int) -> Tensor:
    return states.new_empty((*states.shape[:-1], width), dtype=torch.float32)


def _embed(token_ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:
    return _leading[number].run_embedding(token_ids)


def _embed_shape(token_ids: Tensor, number: int, width: int, dtype: torch.dtype) -> Tensor:
    return token_ids.new_empty((*token_ids.shape, width), dtype=dtype)


_DEFINITIONS: dict[str, tuple[str, Any, Any]] = {
    "head": ("(Tensor states, int leader, int width) -> Tensor", _head, _head_shape),
    "embed": ("(Tensor token_ids, int leader, int width, ScalarType dtype) -> Tensor", _embed, _embed_shape),
}
for _name, (_schema, _run, _shape) in _DEFINITIONS.items():
    define_operator(f"betoken_ranks::{_name}", _schema, _run, _shape)
