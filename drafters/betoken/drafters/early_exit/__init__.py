"""The first layers of the target as drafter."""

from betoken.drafters.model import drafter_of
from betoken.drafters.model.settings import ModelSettings
from betoken.drafters.settings import Option
from betoken.drafters.spec import DrafterSpec

_MODEL = Option(
    "early_exit_model",
    str,
    "",
    "Target model, of whose first layers `early_exit` makes a drafter: a directory, or a hub id.",
    names_weights=True,
    names_target=True,
)
_LAYERS = Option("early_exit_layers", int, 2, "How many of its layers `early_exit` runs.", 1, 1024)

SPEC: DrafterSpec = DrafterSpec(
    name="early_exit",
    make=lambda host: drafter_of(host, _MODEL.name, SPEC.name, host.settings.early_exit_layers),
    explains="accepted from the target's first layers",
    colour="green underline",
    needs=(_MODEL.name,),
    runs_model=True,
    settings=ModelSettings,
    options=(_MODEL, _LAYERS),
)
