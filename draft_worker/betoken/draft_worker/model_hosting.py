"""Loads the models that drafters need, each once. Knows no drafters."""

from __future__ import annotations

import os
from typing import Any

from betoken.common.errors import FailedPreconditionError
from betoken.common.tokenizer_json import tokenizer_difference
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.host.models import load_model
from betoken.drafters.model import TARGET_TOKENIZER
from betoken.drafters.registry import SPECS
from betoken.drafters.shared_pages import SharedPages
from betoken.engine.bring_up.ranks import start_ranks
from betoken.engine.config import EngineConfig
from betoken.engine.model_thread import ModelThread
from betoken.engine.page_table import PageTable
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.checkpoint import Progress
from betoken.kernels.build import give_up
from betoken.rpc.early_end import at_end


class ModelHost:
    """The models of one worker. A model that cannot be served raises FailedPreconditionError."""

    def __init__(
        self, settings: DraftWorkerSettings, progress: Progress, thread: ModelThread[Any] | None = None
    ) -> None:
        """`thread`: fails when a rank of a model is lost."""
        self._settings = settings
        self._thread = thread
        self._progress = progress
        self._models: dict[tuple[str, int | None], tuple[ModelRunner, SharedPages]] = {}
        """Loaded models with their pages, by name and the number of layers asked for."""
        self.page_tables: list[PageTable] = []
        """Page tables of the loaded models; the list changes with them."""
        at_end(give_up)

    @property
    def runners(self) -> list[ModelRunner]:
        """Loaded models, in the order of loading."""
        return [runner for runner, _ in self._models.values()]

    @property
    def tokenizer_hash(self) -> str:
        """Hash that all models with a tokenizer share, as one handshake speaks for all; empty = none has one."""
        infos = [runner.info for runner in self.runners if runner.info.tokenizer_hash]
        if len({info.tokenizer_hash for info in infos}) > 1:
            names = " and ".join(info.model_id for info in infos)
            specs = [spec for spec in SPECS.values() if spec.runs_model and spec.can_host]
            options = dict.fromkeys(need for spec in specs for need in spec.needs)
            raise FailedPreconditionError(f"{', '.join(map(_flag, options))}: {names} have different tokenizers")
        return infos[0].tokenizer_hash if infos else ""

    def check_tokenizers(self) -> None:
        """Compare models in directories before any is loaded; models of the hub are compared after their download.
        Drafts of models with another tokenizer than --target-tokenizer are translated.

        Raises:
            FailedPreconditionError: two tokenizers differ; the text names sizes and the first difference.
        """
        settings = self._settings
        if getattr(settings, TARGET_TOKENIZER.name):
            return
        used = {SPECS[name].used(settings) or "" for name in settings.hosted_drafters if name in SPECS}
        for option in sorted(name for name in used if name not in ("", "model")):
            model = getattr(settings, option)
            if settings.model and (difference := tokenizer_difference(settings.model, model)):
                text = f"{_flag(option)} = {model}: not the tokenizer of --model = {settings.model}: {difference}"
                raise FailedPreconditionError(text)

    def load(
        self, option: str, num_layers: int | None = None, *, adds_to_embeddings: bool = False
    ) -> tuple[ModelRunner, SharedPages]:
        """The model that a setting names, and its pages; loaded once for all drafters that name it.

        Raises:
            FailedPreconditionError: it cannot be served; the text names the option.
        """
        model: str = getattr(self._settings, option)
        settings = self._settings
        key = (_place(model), num_layers)
        if key not in self._models:
            revision = settings.revision if model == settings.model else None  # other repositories have their own
            which: dict[str, Any] = {"model": model, "revision": revision, "num_layers": num_layers}
            which["adds_to_embeddings"] = adds_to_embeddings
            if (most := self._max_uncommitted()) is not None:
                which["max_uncommitted"] = most
            config = EngineConfig(**settings.engine_options() | which)
            if len(settings.devices) > 1:
                self._progress("starting ranks", 0.0)
                config = start_ranks(config, settings.devices, settings.rank_logging, self._thread, at_end)
            runner = load_model(settings, option, config, self._progress)
            self._models[key] = runner, SharedPages(runner.page_table)
            self._list_tables()
        return self._models[key]

    def forget(self, option: str) -> None:
        """Load the model of this option again when it is next needed."""
        place = _place(getattr(self._settings, option))
        self._models = {key: model for key, model in self._models.items() if key[0] != place}
        self._list_tables()

    def _list_tables(self) -> None:
        self.page_tables[:] = [runner.page_table for runner in self.runners]

    def _max_uncommitted(self) -> int | None:
        """Most rows after the committed ids that a hosted drafter needs in a forward; None = the engine's choice."""
        specs = [SPECS[name] for name in self._settings.hosted_drafters if name in SPECS]
        needed = [spec.max_uncommitted(self._settings) for spec in specs if spec.max_uncommitted is not None]
        return max(needed, default=None)


def _place(model: str) -> str:
    """A directory's or file's real path, or a hub id."""
    path = os.path.expanduser(model)  # unlike Path's, these raise for no name
    return os.path.realpath(path) if os.path.exists(path) else model


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
