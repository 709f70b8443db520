"""Loads the models of attached drafters. Knows no drafters."""

from typing import Any

from betoken.drafters.host.models import load_model
from betoken.drafters.shared_pages import SharedPages
from betoken.engine.config import EngineConfig
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.checkpoint import Progress
from betoken.verify_worker.settings import VerifyWorkerSettings


class AttachedModels:
    """Models next to the target, each loaded once. A model that cannot be served raises FailedPreconditionError."""

    def __init__(self, settings: VerifyWorkerSettings, target: ModelRunner, progress: Progress) -> None:
        self._settings, self._target, self._progress = settings, target, progress
        self._models: dict[tuple[str, int | None], tuple[ModelRunner, SharedPages]] = {}

    def load(
        self, option: str, num_layers: int | None = None, *, adds_to_embeddings: bool = False
    ) -> tuple[ModelRunner, SharedPages]:
        """See `DrafterContext.model`. The model has as many pages as the target: whatever the target holds has room
        there, too."""
        key = option, num_layers
        if key not in self._models:
            which: dict[str, Any] = {
                "model": getattr(self._settings, option),
                "revision": None,
                "quantize": None,
                "activations": "auto",  # drafts may be rounded
                "num_layers": num_layers,
                "num_pages": self._target.page_table.num_pages,
                "max_context": None,
                "adds_to_embeddings": adds_to_embeddings,
            }
            config = EngineConfig(**self._settings.engine_options() | which)
            runner = load_model(self._settings, option, config, self._progress)
            self._models[key] = runner, SharedPages(runner.page_table)
        return self._models[key]

    def forget(self, option: str) -> None:
        """Load the model of this option again when it is next needed."""
        self._models = {key: model for key, model in self._models.items() if key[0] != option}
