"""Makes the drafters a worker was told to host, and loads the models they need, each once.

Knows every drafter there is; knows no links.
"""

from dataclasses import dataclass, field

from foretoken.draft_worker.drafter import Drafter
from foretoken.draft_worker.model_drafter import ModelDrafter
from foretoken.draft_worker.ngram_drafter import NgramDrafter, NgramSettings
from foretoken.draft_worker.plugin import is_plugin_path, load_plugin
from foretoken.draft_worker.settings import DraftWorkerSettings
from foretoken.engine.config import EngineConfig
from foretoken.engine.errors import ModelRefusedError
from foretoken.engine.loading import Progress
from foretoken.engine.runner import ModelRunner
from foretoken.rpc.errors import FailedPreconditionError


@dataclass(slots=True)
class Hosted:
    """What a draft worker runs."""

    drafters: dict[str, Drafter] = field(default_factory=dict)
    """By name, the default first."""
    runners: list[ModelRunner] = field(default_factory=list)
    """Loaded models."""


def load_drafters(settings: DraftWorkerSettings, progress: Progress) -> Hosted:
    """Every drafter of `settings.drafters`; plug-ins are looked at before any model is loaded.

    Raises:
        FailedPreconditionError: a plug-in is no drafter, or a model cannot be served.
    """
    made: dict[str, Drafter] = {name: load_plugin(name) for name in settings.drafters if is_plugin_path(name)}
    hosted = Hosted()
    if "ngram" in settings.drafters:
        made["ngram"] = NgramDrafter(_ngram_settings(settings))
    if "model" in settings.drafters:
        runner = _load_model("--model", EngineConfig(**settings.engine_options()), progress)
        hosted.runners.append(runner)
        made["model"] = ModelDrafter(runner, settings.max_batch_rows, settings.max_prefill_rows)
    hosted.drafters = {name: made[name] for name in settings.drafters}
    return hosted


def _load_model(option: str, config: EngineConfig, progress: Progress) -> ModelRunner:
    try:
        return ModelRunner.load(config, progress)
    except ModelRefusedError as error:
        raise FailedPreconditionError(f"{option} = {config.model}: {error}") from error


def _ngram_settings(settings: DraftWorkerSettings) -> NgramSettings:
    return NgramSettings(settings.min_ngram, settings.max_ngram, settings.max_branches, settings.draft_factor)
