"""Writes settings.md next to this file: every option of every service, from the settings classes themselves.

`--check` compares instead and fails when the page is out of date.
"""

import sys
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from betoken.draft_worker.settings import DraftWorkerSettings
from betoken.drafters.registry import SPECS
from betoken.gateway.settings import GatewaySettings
from betoken.router.settings import RouterSettings
from betoken.rpc.settings import ENV_PREFIX, ServiceSettings
from betoken.rpc.worker_settings import WorkerSettings
from betoken.verify_worker.settings import VerifyWorkerSettings

PAGE = Path(__file__).with_name("settings.md")
SERVICES: dict[str, type[ServiceSettings]] = {
    "Router": RouterSettings,
    "Verify worker": VerifyWorkerSettings,
    "Draft worker": DraftWorkerSettings,
}
HEAD = f"""# Settings

The command line beats the environment, which beats the default. Every option `--some-name` is
`{ENV_PREFIX}SOME_NAME` in the environment. Lists are comma-separated. An empty value stands for the default.
A switch (True or False below) takes no value on the command line: `--some-name`, `--no-some-name`. A bad value
stops start-up with the option's name. This page is made by `make docs`; a test compares it with the settings classes.
"""


def num_options(settings: type[ServiceSettings] | type[GatewaySettings]) -> tuple[int, int]:
    """Number of a service's own options, and of its drafters' options."""
    shared = ServiceSettings.model_fields if issubclass(settings, ServiceSettings) else {}
    own = settings.model_fields.keys() - shared.keys()
    of_drafters = {
        option.name for spec in SPECS.values() for option in spec.all_options
    } - WorkerSettings.model_fields.keys()
    return len(own - of_drafters), len(own & of_drafters)


def _counted(settings: type[ServiceSettings] | type[GatewaySettings]) -> str:
    num_own, num_of_drafters = num_options(settings)
    return f"{num_own} own options" + (f", {num_of_drafters} of drafters." if num_of_drafters else ".") + "\n"


def render() -> str:
    """The page."""
    shared = ServiceSettings.model_fields
    parts = [HEAD, "## Every service but the gateway\n", _table(shared)]
    for title, settings in SERVICES.items():
        parts += [
            f"\n## {title}\n",
            _counted(settings),
            _table(
                {n: f for n, f in settings.model_fields.items() if n not in shared or f.default != shared[n].default}
            ),
        ]
    parts += [
        "\n## Gateway\n",
        f"It shares no options with the other services. {_counted(GatewaySettings)}",
        _table(GatewaySettings.model_fields),
    ]
    return "\n".join(parts) + "\n"


def _table(fields: dict[str, FieldInfo]) -> str:
    rows = ["| option | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in fields.items():
        option = f"`--{name.replace('_', '-')}`"
        rows.append(f"| {option} | `{ENV_PREFIX}{name.upper()}` | {_default(field)} | {_meaning(field)} |")
    return "\n".join(rows)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == "" or value == ():
        return "–"
    return f"`{','.join(value) if isinstance(value, tuple) else value}`"


def _meaning(field: FieldInfo) -> str:
    bounds = [f"{sign} {bound}" for sign, bound in _bounds(field)]
    choices = [repr(choice).strip("'") for choice in get_args(field.annotation) if isinstance(choice, str)]
    extra = [", ".join(bounds)] if bounds else []
    extra += [" \\| ".join(choices)] if choices else []
    return (field.description or "").replace("|", "\\|") + (f" ({'; '.join(extra)})" if extra else "")


def _bounds(field: FieldInfo) -> list[tuple[str, Any]]:
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    return [(signs[name], getattr(m, name)) for m in field.metadata for name in signs if hasattr(m, name)]


def main() -> int:
    """Write or check the page."""
    text = render()
    if "--check" in sys.argv[1:]:
        return 0 if PAGE.exists() and PAGE.read_text() == text else 1
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
