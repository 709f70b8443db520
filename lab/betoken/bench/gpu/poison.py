"""Poisoned memory that reveals unwritten elements: new tensors are filled with NaN, integer tensors with -7."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch


@contextmanager
def poisoned() -> Iterator[None]:
    """Fills every tensor that `torch.empty` and its kin return until the block ends."""
    with (
        patch.object(torch, "empty", _filled(torch.empty)),
        patch.object(torch, "empty_like", _filled(torch.empty_like)),
        patch.object(torch.Tensor, "new_empty", _filled(torch.Tensor.new_empty)),
    ):
        yield


def _filled(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -7)

    return call
