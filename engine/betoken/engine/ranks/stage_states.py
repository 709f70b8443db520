"""Sizes of recurrent states in the layers of all pipeline stages: every stage counts the same states and snapshots."""

from collections.abc import Mapping
from dataclasses import astuple

import torch

from betoken.engine.rank_group import RankGroup
from betoken.engine.state_shapes import RecurrentShape, StateShape

_NO_RECURRENCE = (0,) * 5


def states_of_all(group: RankGroup, states: Mapping[int, StateShape]) -> dict[int, StateShape]:
    """Return the states of all stages' layers by layer; all ranks together."""
    if group.num_stages == 1:
        return dict(states)
    num_layers = -group.least(-max(states, default=-1)) + 1
    if not num_layers:
        return {}
    rows = torch.zeros(num_layers, 3 + len(_NO_RECURRENCE), dtype=torch.int64)
    for layer, shape in states.items():
        sizes = _NO_RECURRENCE if shape.recurrence is None else astuple(shape.recurrence)
        rows[layer] = torch.tensor([1, shape.num_channels, shape.num_taps, *sizes])
    found = {}
    for layer, (has_state, num_channels, num_taps, *sizes) in enumerate(group.stack(rows).amax(0).tolist()):
        if has_state:
            recurrence = RecurrentShape(*sizes) if any(sizes) else None
            found[layer] = StateShape(num_channels, num_taps, recurrence)
    return found
