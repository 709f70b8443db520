"""Makes the drafters a worker was told to host, and loads the models they need, each once.

Knows every drafter there is; knows no links.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foretoken.draft_worker.drafter import Drafter
from foretoken.draft_worker.fused_drafter import FusedDrafter
from foretoken.draft_worker.lookahead.drafter import LookaheadDrafter
from foretoken.draft_worker.lookahead.settings import LookaheadSettings
from foretoken.draft_worker.model_drafter import ModelDrafter
from foretoken.draft_worker.model_sequence import ModelSettings
from foretoken.draft_worker.ngram_drafter import NgramDrafter, NgramSettings
from foretoken.draft_worker.plugin import is_plugin_path, load_plugin
from foretoken.draft_worker.settings import DraftWorkerSettings
from foretoken.draft_worker.shared_pages import SharedPages
from foretoken.draft_worker.staged_drafter import StagedDrafter
from foretoken.engine.config import EngineConfig
from foretoken.engine.errors import ModelRefusedError
from foretoken.engine.loading import Progress
from foretoken.engine.runner import ModelRunner
from foretoken.rpc.errors import FailedPreconditionError
from foretoken.v1.types_pb2 import DRAFT_SOURCE_EARLY_EXIT, DRAFT_SOURCE_MODEL, DraftSource


@dataclass(slots=True)
class Hosted:
    """What a draft worker runs."""

    drafters: dict[str, Drafter] = field(default_factory=dict)
    """By name, the default first."""
    models: dict[tuple[str, int | None], tuple[ModelRunner, SharedPages]] = field(default_factory=dict)
    """Loaded models with their pages, by name and the number of layers asked for."""
    tokenizer_hash: str = ""
    """Of all models that have a tokenizer; empty = none has."""

    @property
    def runners(self) -> list[ModelRunner]:
        """Loaded models, the first the worker speaks for."""
        return [runner for runner, _ in self.models.values()]


def load_drafters(settings: DraftWorkerSettings, progress: Progress) -> Hosted:
    """Every drafter of `settings.drafters`; plug-ins are looked at before any model is loaded.

    Raises:
        FailedPreconditionError: a plug-in is no drafter, or a model cannot be served.
    """
    made: dict[str, Drafter] = {name: load_plugin(name) for name in settings.drafters if is_plugin_path(name)}
    hosted = Hosted()
    ngram_settings = NgramSettings(settings.min_ngram, settings.max_ngram, settings.max_branches, settings.draft_factor)
    if "ngram" in settings.drafters:
        made["ngram"] = NgramDrafter(ngram_settings)
    if "model" in settings.drafters or "staged" in settings.drafters:
        model = _model_drafter(hosted, settings, "--model", settings.model, DRAFT_SOURCE_MODEL, progress)
        made["model"] = model
        made["staged"] = StagedDrafter(model, ngram_settings)
    if "early_exit" in settings.drafters:
        name = settings.early_exit_model
        made["early_exit"] = _model_drafter(
            hosted, settings, "--early-exit-model", name, DRAFT_SOURCE_EARLY_EXIT, progress, settings.early_exit_layers
        )
    if "lookahead" in settings.drafters:
        made["lookahead"] = _lookahead_drafter(hosted, settings, progress)
    if "fused" in settings.drafters:
        made["fused"] = FusedDrafter({name: made[name] for name in settings.drafters if name != "fused"})
    hosted.drafters = {name: made[name] for name in settings.drafters}
    hosted.tokenizer_hash = _shared_tokenizer(hosted.runners)
    return hosted


def _model_drafter(
    hosted: Hosted,
    settings: DraftWorkerSettings,
    option: str,
    model: str,
    source: DraftSource,
    progress: Progress,
    num_layers: int | None = None,
) -> ModelDrafter:
    runner, pages = _load(hosted, settings, option, model, progress, num_layers)
    model_settings = ModelSettings(settings.model_branches, settings.model_depth)
    return ModelDrafter(runner, settings.max_batch_rows, settings.max_prefill_rows, source, model_settings, pages)


def _lookahead_drafter(hosted: Hosted, settings: DraftWorkerSettings, progress: Progress) -> LookaheadDrafter:
    option, model = "--lookahead-model", settings.lookahead_model
    if not model:
        option, model = "--model", settings.model
    runner, pages = _load(hosted, settings, option, model, progress)
    lookahead_settings = LookaheadSettings(
        window=settings.lookahead_window,
        ngram_size=settings.lookahead_ngram_size,
        guesses=settings.lookahead_guesses,
        steps=settings.lookahead_steps,
        seed_from_prompt=settings.lookahead_seed_from_prompt,
    )
    return LookaheadDrafter(runner, settings.max_batch_rows, settings.max_prefill_rows, lookahead_settings, pages)


def _load(
    hosted: Hosted,
    settings: DraftWorkerSettings,
    option: str,
    model: str,
    progress: Progress,
    num_layers: int | None = None,
) -> tuple[ModelRunner, SharedPages]:
    """The model and its pages; loaded once for all drafters that name it.

    Raises:
        FailedPreconditionError: it cannot be served; the message names `option`.
    """
    path = Path(model).expanduser()
    key = (str(path.resolve()) if path.is_dir() else model, num_layers)
    if key not in hosted.models:
        revision = settings.revision if model == settings.model else None  # other repositories have their own
        which = {"model": model, "revision": revision, "num_layers": num_layers}
        config = EngineConfig(**settings.engine_options() | which)
        try:
            runner = ModelRunner.load(config, progress)
        except ModelRefusedError as error:
            raise FailedPreconditionError(f"{option} = {model}: {error}") from error
        hosted.models[key] = runner, SharedPages(runner.page_table)
    return hosted.models[key]


def _shared_tokenizer(runners: Sequence[ModelRunner]) -> str:
    """One handshake speaks for all models."""
    infos = [runner.info for runner in runners if runner.info.tokenizer_hash]
    if len({info.tokenizer_hash for info in infos}) > 1:
        names = " and ".join(info.model_id for info in infos)
        raise FailedPreconditionError(
            f"--model, --early-exit-model, --lookahead-model: {names} have different tokenizers"
        )
    return infos[0].tokenizer_hash if infos else ""
