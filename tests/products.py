"""Parameters of tests with several dimensions: few combinations by default, the whole product in the slow run."""

import random
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """These values as parameters of the slow run."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def slow_but_every(step: int, cases: Sequence[Sequence[Any]]) -> list[Any]:
    """The cases as parameters, of which only every `step`-th is in the default run."""
    marks = pytest.mark.slow
    return [pytest.param(*case, marks=marks if place % step else ()) for place, case in enumerate(cases)]


def covering(*dimensions: Iterable[Any], strength: int = 2, ids: Callable[[Any], object] | None = None) -> list[Any]:
    """Return all combinations as parameters; one is slow unless it covers new values for the default run.

    With strength 1 every value occurs in the default run, with 2 every pair of values of two dimensions.
    """
    values = [list(dimension) for dimension in dimensions]
    indices = list(product(*(range(len(one)) for one in values)))
    chosen = _cover(indices, strength)
    parameters = []
    for index in indices:
        case = [one[place] for one, place in zip(values, index, strict=True)]
        name = None if ids is None else "-".join(str(ids(value)) for value in case)
        parameters.append(pytest.param(*case, id=name, marks=() if index in chosen else pytest.mark.slow))
    return parameters


def _cover(indices: Sequence[tuple[int, ...]], strength: int) -> set[tuple[int, ...]]:
    """A small set of combinations that holds every `strength` of their values; the same in every run."""
    places = list(combinations(range(len(indices[0])), strength))
    missing = {(place, tuple(index[at] for at in place)) for index in indices for place in places}
    order = random.Random(0).sample(indices, len(indices))
    chosen: set[tuple[int, ...]] = set()
    for num_new in range(len(places), 0, -1):
        for index in order:
            added = {(place, tuple(index[at] for at in place)) for place in places} & missing
            if len(added) >= num_new:
                chosen.add(index)
                missing -= added
    return chosen
