"""Names of the served model at this gateway, instead of the router's model id."""

from __future__ import annotations

from collections.abc import Sequence

from betoken.gateway.errors import RefusedError


class ModelNames:
    """The names of `--served-model-name`; without them the router's model id is the only name."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)

    def shown(self, model: str) -> tuple[str, ...]:
        """Names under which `model`, the router's id, is listed; responses have the first."""
        return self._names or (model,)

    def for_router(self, name: str) -> str:
        """`model` of a request as the router knows it. An unknown name is kept, so that the router rejects it."""
        return "" if name in self._names else name

    def check(self, name: str, model: str) -> None:
        """Raises:
        RefusedError: `name` is not the served model's.
        """
        if name not in (*self._names, model):
            text = f"model {name[:200]!r} is not served here; {self.shown(model)[0]!r} is"
            raise RefusedError("model", text, status=404, code="model_not_found")
