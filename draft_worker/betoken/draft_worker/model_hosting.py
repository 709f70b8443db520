"""Makes the drafters that run a model, and loads the models they need, each once."""

from __future__ import annotations

import os

from betoken.common.errors import FailedPreconditionError
from betoken.common.tokenizer_json import tokenizer_difference
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.drafter import Drafter
from betoken.drafters.lookahead.drafter import LookaheadDrafter
from betoken.drafters.lookahead.settings import LookaheadSettings
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.model.sequence import ModelSettings
from betoken.drafters.ngram.drafter import NgramSettings
from betoken.drafters.shared_pages import SharedPages
from betoken.drafters.staged import StagedDrafter
from betoken.engine.bring_up.load import load_runner
from betoken.engine.config import EngineConfig
from betoken.engine.errors import ModelRefusedError
from betoken.engine.runner import ModelRunner
from betoken.engine.weights.checkpoint import Progress
from betoken.kernels.build import give_up
from betoken.rpc.early_end import at_end
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1.types_pb2 import DRAFT_SOURCE_EARLY_EXIT, DRAFT_SOURCE_MODEL, DraftSource


class ModelHost:
    """The models of one worker. What cannot be served raises FailedPreconditionError."""

    def __init__(self, settings: DraftWorkerSettings, progress: Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._max_prefill_rows = settings.max_prefill_rows or USUAL_PREFILL_ROWS
        self._models: dict[tuple[str, int | None], tuple[ModelRunner, SharedPages]] = {}
        """Loaded models with their pages, by name and the number of layers asked for."""
        at_end(give_up)

    @property
    def runners(self) -> list[ModelRunner]:
        """Loaded models, in the order of loading."""
        return [runner for runner, _ in self._models.values()]

    @property
    def tokenizer_hash(self) -> str:
        """Of all models that have a tokenizer, as one handshake speaks for all; empty = none has."""
        infos = [runner.info for runner in self.runners if runner.info.tokenizer_hash]
        if len({info.tokenizer_hash for info in infos}) > 1:
            names = " and ".join(info.model_id for info in infos)
            raise FailedPreconditionError(
                f"--model, --early-exit-model, --lookahead-model: {names} have different tokenizers"
            )
        return infos[0].tokenizer_hash if infos else ""

    def load_drafters(self, ngram_settings: NgramSettings) -> dict[str, Drafter]:
        """Every drafter of the settings that runs a model, by name; `model` also where `staged` alone needs it."""
        settings = self._settings
        self._check_tokenizers()
        made: dict[str, Drafter] = {}
        if "model" in settings.drafters or "staged" in settings.drafters:
            model = self._model_drafter("--model", settings.model, DRAFT_SOURCE_MODEL)
            made["model"] = model
            made["staged"] = StagedDrafter(model, ngram_settings)
        if "early_exit" in settings.drafters:
            made["early_exit"] = self._model_drafter(
                "--early-exit-model", settings.early_exit_model, DRAFT_SOURCE_EARLY_EXIT, settings.early_exit_layers
            )
        if "lookahead" in settings.drafters:
            made["lookahead"] = self._lookahead_drafter()
        return made

    def _check_tokenizers(self) -> None:
        """Of models in directories, before any is loaded: those of the hub are compared once they are here."""
        settings = self._settings
        users = {"--early-exit-model": "early_exit", "--lookahead-model": "lookahead"}
        names = {"--early-exit-model": settings.early_exit_model, "--lookahead-model": settings.lookahead_model}
        for option, model in names.items():
            is_used = users[option] in settings.drafters and model and settings.model
            if is_used and (difference := tokenizer_difference(settings.model, model)):
                text = f"{option} = {model}: not the tokenizer of --model = {settings.model}: {difference}"
                raise FailedPreconditionError(text)

    def _model_drafter(
        self, option: str, model: str, source: DraftSource, num_layers: int | None = None
    ) -> ModelDrafter:
        settings = self._settings
        runner, pages = self._load(option, model, num_layers)
        model_settings = ModelSettings(settings.model_branches, settings.model_depth)
        return ModelDrafter(runner, settings.max_batch_rows, self._max_prefill_rows, source, model_settings, pages)

    def _lookahead_drafter(self) -> LookaheadDrafter:
        settings = self._settings
        option, model = "--lookahead-model", settings.lookahead_model
        if not model:
            option, model = "--model", settings.model
        runner, pages = self._load(option, model)
        lookahead_settings = LookaheadSettings(
            window=settings.lookahead_window,
            ngram_size=settings.lookahead_ngram_size,
            guesses=settings.lookahead_guesses,
            steps=settings.lookahead_steps,
            seed_from_prompt=settings.lookahead_seed_from_prompt,
        )
        return LookaheadDrafter(runner, settings.max_batch_rows, self._max_prefill_rows, lookahead_settings, pages)

    def _load(self, option: str, model: str, num_layers: int | None = None) -> tuple[ModelRunner, SharedPages]:
        """The model and its pages; loaded once for all drafters that name it. A refusal names `option`."""
        settings = self._settings
        path = os.path.expanduser(model)  # unlike Path's, these raise for no name
        key = (os.path.realpath(path) if os.path.isdir(path) else model, num_layers)
        if key not in self._models:
            revision = settings.revision if model == settings.model else None  # other repositories have their own
            which = {"model": model, "revision": revision, "num_layers": num_layers}
            config = EngineConfig(**settings.engine_options() | which)
            try:
                runner = load_runner(config, self._progress)
            except ModelRefusedError as error:
                raise FailedPreconditionError(f"{option} = {model}: {error}") from error
            self._models[key] = runner, SharedPages(runner.page_table)
        return self._models[key]
