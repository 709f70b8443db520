"""The first layers of the target as drafter."""

from betoken.drafters.model import drafter_of
from betoken.drafters.spec import DrafterSpec

SPEC: DrafterSpec = DrafterSpec(
    name="early_exit",
    make=lambda host: drafter_of(host, "early_exit_model", SPEC.name, host.settings.early_exit_layers),
    explains="accepted from the target's first layers",
    colour="green underline",
    needs=("early_exit_model",),
    runs_model=True,
)
