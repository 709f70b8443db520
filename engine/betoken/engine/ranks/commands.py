"""Commands from rank 0 to the other ranks as arrays of numbers: what each rank does next.

No command holds code or objects, so a message can be malformed but never run anything.
"""

from collections.abc import Sequence
from enum import IntEnum, auto
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from betoken.engine.batch import Batch
from betoken.engine.snapshots import StateCopy
from betoken.engine.state_table import OwnState, PageList
from betoken.engine.tree import KeptPath

Numbers = NDArray[np.int32]


class Command(IntEnum):
    """An action of all ranks together."""

    FORWARD = auto()
    """Run a batch."""
    COMPACT = auto()
    """Turn accepted tree paths into chains."""
    COPY_STATES = auto()
    """Copy recurrent states to snapshots and back."""
    COMPILE = auto()
    RUN_EAGERLY = auto()
    HEAD = auto()
    """Run the output layer on states of a drafter, on the last stage."""
    EMBED = auto()
    """Look up embeddings for a drafter, on the last stage."""
    EXACT_ROWS = auto()
    """Multiply exact activations, or rounded ones again."""
    RELOAD = auto()
    """Load the model anew."""


def pack(command: Command, *parts: ArrayLike) -> Numbers:
    """A message: the command, the number of parts, their lengths, their numbers."""
    arrays = [np.asarray(part, np.int32).ravel() for part in parts]
    return np.concatenate([[command, len(arrays)], [len(array) for array in arrays], *arrays]).astype(np.int32)


def unpack(message: Numbers) -> tuple[Command, list[Numbers]]:
    """The command and its parts."""
    num_parts = int(message[1])
    ends = np.cumsum(message[2 : 2 + num_parts])
    return Command(int(message[0])), np.split(message[2 + num_parts :], ends)[:num_parts]


def pack_batch(batch: Batch) -> Numbers:
    """The command to run a batch."""
    flags = [batch.num_segments, batch.has_trees]
    columns = () if batch.state_columns is None else batch.state_columns
    ids = (batch.token_ids, batch.positions, batch.logit_rows)
    return pack(Command.FORWARD, flags, *ids, batch.layout, columns, batch.adapters or ())


def unpack_batch(parts: Sequence[Numbers]) -> Batch:
    """The batch of a command."""
    (num_segments, has_trees), *ids, layout, columns, adapters = parts
    token_ids, positions, logit_rows = (part.tolist() for part in ids)
    # The kernels read it by its address.
    batch = Batch(token_ids, positions, logit_rows, layout.copy(), int(num_segments), bool(has_trees))
    if len(columns):
        batch.state_columns = columns.reshape(4, -1).copy()
    if len(adapters):
        batch.adapters = tuple(adapters.tolist())
    return batch


def pack_paths(paths: Sequence[KeptPath]) -> Numbers:
    """The command to compact paths: of each its start and state, its nodes and its pages."""
    parts: list[Any] = []
    for path in paths:
        state = path.page_ids.state if isinstance(path.page_ids, PageList) else None
        parts += [[path.tree_start, 0 if state is None else state.index], path.nodes, list(path.page_ids)]
    return pack(Command.COMPACT, *parts)


def unpack_paths(parts: Sequence[Numbers]) -> list[KeptPath]:
    """The paths of a command."""
    found = []
    for (tree_start, state), nodes, page_ids in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        pages = PageList(page_ids.tolist(), OwnState(int(state)) if state else None)
        found.append(KeptPath(pages, int(tree_start), nodes.tolist()))
    return found


def pack_copies(copies: Sequence[StateCopy]) -> Numbers:
    """The command to copy states."""
    return pack(Command.COPY_STATES, np.array(copies, np.int32))


def unpack_copies(parts: Sequence[Numbers]) -> list[StateCopy]:
    """The copies of a command."""
    rows = parts[0].reshape(-1, len(StateCopy._fields)).tolist()
    return [StateCopy(state, snapshot, length, bool(restores)) for state, snapshot, length, restores in rows]
