"""Makes the drafters a worker was told to host.

Knows what a drafter's spec tells; knows no links, and nothing of models where none is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from betoken.common.errors import FailedPreconditionError
from betoken.common.release import how_to_install
from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.drafter import Drafter
from betoken.drafters.plugin import is_plugin_path, load_plugin
from betoken.drafters.registry import SPECS
from betoken.rpc.worker_settings import USUAL_PREFILL_ROWS
from betoken.v1.types_pb2 import SourceInfo

if TYPE_CHECKING:
    from betoken.draft_worker.model_hosting import ModelHost
    from betoken.drafters.shared_pages import SharedPages
    from betoken.engine.runner import ModelRunner
    from betoken.engine.weights.checkpoint import Progress


@dataclass(slots=True)
class Hosted:
    """The parts of a draft worker."""

    drafters: dict[str, Drafter] = field(default_factory=dict)
    """Drafters by name, the default first."""
    runners: list[ModelRunner] = field(default_factory=list)
    """Loaded models, the first the worker speaks for."""
    tokenizer_hash: str = ""
    """Hash that all models with a tokenizer share; empty = none has one."""


def load_drafters(settings: DraftWorkerSettings, progress: Progress) -> Hosted:
    """Every drafter of the settings; plug-ins are looked at before any model is loaded.

    Raises:
        FailedPreconditionError: a plug-in is not a drafter, or a model cannot be served: torch may be missing.
    """
    names = settings.hosted_drafters
    host = Host(settings)
    for name in names:
        if is_plugin_path(name):
            host.made[name] = load_plugin(name)
    if any(SPECS[name].runs_model for name in names if name in SPECS):
        host.models = _model_host(settings, progress)
        host.models.check_tokenizers()
    hosted = Hosted({name: host.drafter(name) for name in names})
    if host.models is not None:
        hosted.runners, hosted.tokenizer_hash = host.models.runners, host.models.tokenizer_hash
    return hosted


def source_infos(names: Sequence[str]) -> list[SourceInfo]:
    """Names, colours and kinds of the sources of draft tokens: every drafter with a spec, and the plug-ins among
    `names`."""
    infos = [
        SourceInfo(name=source.name, explains=source.explains, colour=source.colour)
        for spec in SPECS.values()
        for source in spec.sources
    ]
    plugins = [name for name in names if is_plugin_path(name)]
    return infos + [
        SourceInfo(name=name, explains=f"accepted from the plug-in {name}", colour="blue underline") for name in plugins
    ]


class Host:
    """The services of this worker to its drafters; see `DrafterContext`."""

    def __init__(self, settings: DraftWorkerSettings) -> None:
        self.settings = settings
        self.max_prefill_rows = settings.max_prefill_rows or USUAL_PREFILL_ROWS
        self.made: dict[str, Drafter] = {}
        """Drafters made so far by name, hosted or not."""
        self.models: ModelHost | None = None

    def model(self, option: str, num_layers: int | None = None) -> tuple[ModelRunner, SharedPages]:
        """See `DrafterContext`."""
        assert self.models is not None, "a drafter that runs a model says so in its spec"
        return self.models.load(option, num_layers)

    def drafter(self, name: str) -> Drafter:
        """See `DrafterContext`."""
        if name not in self.made:
            self.made[name] = SPECS[name].make(self)
        return self.made[name]

    @property
    def target(self) -> ModelRunner:
        """See `DrafterContext`."""
        raise AssertionError("a drafter that needs the target cannot be hosted here, as its spec says")

    def others(self, name: str) -> dict[str, Drafter]:
        """See `DrafterContext`."""
        return {other: self.drafter(other) for other in self.settings.hosted_drafters if other != name}


def _model_host(settings: DraftWorkerSettings, progress: Progress) -> ModelHost:
    # Imported here, since torch and transformers take seconds and hundreds of megabytes that n-grams do without.
    try:
        from betoken.draft_worker.model_hosting import ModelHost
    except ModuleNotFoundError as error:
        if error.name is None:  # transformers' own, of a package that is there and broken: its causes tell which
            raise
        reason = f"a drafter with a model needs {error.name}: {how_to_install('worker')}"
        raise FailedPreconditionError(reason) from error
    return ModelHost(settings, progress)
