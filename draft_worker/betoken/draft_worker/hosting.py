"""Makes the drafters a worker was told to host.

Knows every drafter there is; knows no links, and nothing of models where none is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from betoken.common.errors import FailedPreconditionError
from betoken.common.release import how_to_install
from betoken.draft_worker.settings import MODEL_DRAFTERS, DraftWorkerSettings
from betoken.drafters.drafter import Drafter
from betoken.drafters.fused.drafter import FusedDrafter
from betoken.drafters.ngram.drafter import NgramDrafter, NgramSettings
from betoken.drafters.plugin import is_plugin_path, load_plugin

if TYPE_CHECKING:
    from betoken.engine.runner import ModelRunner
    from betoken.engine.weights.checkpoint import Progress


@dataclass(slots=True)
class Hosted:
    """What a draft worker runs."""

    drafters: dict[str, Drafter] = field(default_factory=dict)
    """By name, the default first."""
    runners: list[ModelRunner] = field(default_factory=list)
    """Loaded models, the first the worker speaks for."""
    tokenizer_hash: str = ""
    """Of all models that have a tokenizer; empty = none has."""


def load_drafters(settings: DraftWorkerSettings, progress: Progress) -> Hosted:
    """Every drafter of `settings.drafters`; plug-ins are looked at before any model is loaded.

    Raises:
        FailedPreconditionError: a plug-in is no drafter, or a model cannot be served: torch may be missing.
    """
    made: dict[str, Drafter] = {name: load_plugin(name) for name in settings.drafters if is_plugin_path(name)}
    hosted = Hosted()
    ngram_settings = NgramSettings(settings.min_ngram, settings.max_ngram, settings.max_branches, settings.draft_factor)
    if "ngram" in settings.drafters:
        made["ngram"] = NgramDrafter(ngram_settings)
    if not MODEL_DRAFTERS.isdisjoint(settings.drafters):
        # Here, since it takes torch and transformers: seconds, and hundreds of megabytes, that n-grams have no use for.
        try:
            from betoken.draft_worker.model_hosting import ModelHost
        except ModuleNotFoundError as error:
            if error.name is None:  # transformers' own, of a package that is there and broken: its causes tell which
                raise
            reason = f"a drafter with a model needs {error.name}: {how_to_install('worker')}"
            raise FailedPreconditionError(reason) from error
        models = ModelHost(settings, progress)
        made |= models.load_drafters(ngram_settings)
        hosted.runners, hosted.tokenizer_hash = models.runners, models.tokenizer_hash
    if "fused" in settings.drafters:
        made["fused"] = FusedDrafter({name: made[name] for name in settings.drafters if name != "fused"})
    hosted.drafters = {name: made[name] for name in settings.drafters}
    return hosted
