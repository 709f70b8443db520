"""Medusa: heads on the target's last hidden state, each of which guesses one token further ahead. Attached only."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from betoken.drafters.medusa.settings import MedusaSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterContext, DrafterSpec, FeatureNeeds

if TYPE_CHECKING:
    from betoken.drafters.drafter import Drafter


def _make(host: DrafterContext) -> Drafter:
    from betoken.drafters.medusa.hosting import make_drafter

    return make_drafter(host)


def _check_directory(path: Path) -> None:
    if not path.is_dir():
        raise ValueError("must be a directory")


_OPTIONS = (
    Option(
        "medusa",
        Path,
        None,
        "Directory of the heads that `medusa` drafts with; default: those in the target's own checkpoint, if it holds"
        " some.",
        names_weights=True,
    ),
    Option(
        "adapter_dir",
        Path,
        None,
        "Folder of further heads; a request names one by its directory's name; default: none.",
        check=_check_directory,
    ),
    Option("max_adapters", int, 4, "Most adapters in memory; the least recently used goes.", 1, 1024),
)

SPEC = DrafterSpec(
    name="medusa",
    make=_make,
    explains="accepted from Medusa heads",
    colour="magenta underline",
    can_attach=True,
    can_host=False,
    features=FeatureNeeds(layers=lambda settings, num_layers: (num_layers,)),
    settings=MedusaSettings,
    options=_OPTIONS,
)
