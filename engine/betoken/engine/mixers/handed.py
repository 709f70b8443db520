"""The context of a model's call, for mixers that the model's code hands nothing to.

Some families keep the keywords of their call from their mixers. So each of our mixers reads the context here instead.
"""

from typing import Any

from torch import nn

from betoken.engine.attention import CONTEXT_KEYWORD, AttentionContext, current_context, set_context


class Handed:
    """A model's context while this thread calls the model."""

    @property
    def context(self) -> AttentionContext:
        """The context of the call.

        Raises:
            ModelRefusedError: the model is called without one.
        """
        return current_context()

    def take(self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """A hook before the model's forward."""
        set_context(keywords.get(CONTEXT_KEYWORD))

    def leave(self, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        """A hook after it."""
        set_context(None)


def hand_over(model: nn.Module) -> Handed:
    """Context of the model's mixers; each call of the model sets it."""
    handed = Handed()
    model.register_forward_pre_hook(handed.take, with_kwargs=True)
    model.register_forward_hook(handed.leave, always_call=True)
    return handed
