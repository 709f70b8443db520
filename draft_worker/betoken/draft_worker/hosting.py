"""Makes the drafters of a draft worker, with their models if they run any."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from betoken.common.errors import FailedPreconditionError
from betoken.common.release import how_to_install
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.drafter import Drafter
from betoken.drafters.host.making import DrafterMaker
from betoken.drafters.registry import SPECS

if TYPE_CHECKING:
    from betoken.draft_worker.model_hosting import ModelHost
    from betoken.engine.model_thread import ModelThread
    from betoken.engine.page_table import PageTable
    from betoken.engine.runner import ModelRunner
    from betoken.engine.weights.checkpoint import Progress


@dataclass(slots=True)
class Hosted:
    """The parts of a draft worker."""

    maker: DrafterMaker
    drafters: dict[str, Drafter]
    """Drafters by name, the default first."""
    runners: list[ModelRunner] = field(default_factory=list)
    """Loaded models; the handshake describes the first."""
    tokenizer_hash: str = ""
    """Hash of the tokenizer whose ids drafts have; empty = not known."""
    page_tables: list[PageTable] = field(default_factory=list)
    """Page tables of the loaded models; a reload changes them."""

    @property
    def mask_token_id(self) -> int | None:
        """Mask token of the PARD model that drafts; None without one."""
        masks = (getattr(self.drafters[name], "mask_token_id", None) for name in self.drafters if name in SPECS)
        return next((mask for mask in masks if mask is not None), None)


def load_drafters(settings: DraftWorkerSettings, progress: Progress, thread: ModelThread[Any] | None = None) -> Hosted:
    """The drafters of the settings. `thread`: fails when a rank of a model is lost.

    Raises:
        FailedPreconditionError: a plug-in is not a drafter, or a model cannot be served: torch may be missing.
    """
    names = settings.hosted_drafters
    maker = DrafterMaker(settings, names)
    if not any(SPECS[name].runs_model for name in names if name in SPECS):
        return Hosted(maker, maker.make())
    maker.models = models = _model_host(settings, progress, thread)
    models.check_tokenizers()
    drafters = maker.make()
    tokenizer_hash = models.tokenizer_hash if maker.translator is None else maker.translator.hash
    return Hosted(maker, drafters, models.runners, tokenizer_hash, models.page_tables)


def _model_host(settings: DraftWorkerSettings, progress: Progress, thread: ModelThread[Any] | None) -> ModelHost:
    # Imported here, since torch and transformers take seconds and hundreds of megabytes that n-grams do without.
    try:
        from betoken.draft_worker.model_hosting import ModelHost
    except ModuleNotFoundError as error:
        if error.name is None:  # transformers' own, of an installed but broken package: its causes name it
            raise
        reason = f"a drafter with a model needs {error.name}: {how_to_install('worker')}"
        raise FailedPreconditionError(reason) from error
    return ModelHost(settings, progress, thread)
