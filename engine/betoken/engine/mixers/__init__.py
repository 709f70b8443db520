"""Layers that mix tokens, for the families whose own code does not use a batch over pages and state pools.

They read the batch from the context of the model's call. They know neither pages nor sequences.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from betoken.engine.mixers.handed import Handed

MakeMixer = Callable[[Any, Handed], nn.Module]
"""A layer of transformers, the context of the model's calls -> the layer that replaces it."""
