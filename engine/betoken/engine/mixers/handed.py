"""The context of a model's call, for mixers that the model's code hands nothing to.

Some families keep the keywords of their call from their mixers. So each mixer of ours reads the context here instead.
"""

import threading
from typing import Any

from torch import nn

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext
from betoken.engine.errors import ModelRefusedError


class Handed(threading.local):
    """A model's context while this thread calls the model."""

    _context: AttentionContext | None = None

    @property
    def context(self) -> AttentionContext:
        """The context of the call.

        Raises:
            ModelRefusedError: the model is called without one.
        """
        if self._context is None:
            raise ModelRefusedError("a layer that mixes tokens is called without a batch")
        return self._context

    def take(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A hook before the model's forward."""
        self._context = keywords.get(CONTEXT_KEYWORD)

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """A hook after it."""
        self._context = None


def hand_over(model: nn.Module) -> Handed:
    """What the model's mixers read; each call of the model sets it."""
    handed = Handed()
    model.register_forward_pre_hook(handed.take, with_kwargs=True)
    model.register_forward_hook(handed.leave, always_call=True)
    return handed
