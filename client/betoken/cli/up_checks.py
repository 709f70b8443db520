"""The options of `betoken up`, checked before anything starts: models, drafters, the router's place.

Knows the options' names; starts nothing.
"""

from __future__ import annotations

import errno
import os
import shlex
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import typer

from betoken.cli.local_services import LOOPBACK, embedded_models
from betoken.client import ClientTls
from betoken.common.address import is_socket
from betoken.common.gguf import GgufError
from betoken.common.model_path import path_fault
from betoken.common.tokenizer_json import text_difference, tokenizer_text

_DEFAULT_PORT = 50051
DEFAULT_HTTP_PORT = 8000
_DRAFT = "--draft"
_DRAFTERS = "--drafters"
_ATTACHED = "--attached-drafters"


def models(target: str | None, draft: str | None) -> tuple[str, str]:
    if target is not None:
        return target, draft or ""
    embedded = embedded_models()
    if embedded is None:
        raise typer.BadParameter("models/target does not exist here; name a model", param_hint="--target")
    return str(embedded / "target"), draft or str(embedded / "draft")


def drafter_models(target: str, draft: str, weights: Mapping[str, str]) -> SimpleNamespace:
    """The models that drafters find, by the names of a draft worker's settings; empty = none."""
    from betoken.drafters.registry import SPECS, target_options  # of the services, which are installed by now

    absent = dict.fromkeys((need for spec in SPECS.values() for need in spec.needs), "")
    of_target = {option.name: target for option in target_options()}
    return SimpleNamespace(**absent | dict(weights) | of_target | {"model": draft})


def drafters(asked: str | None, models: SimpleNamespace, attached: Sequence[str]) -> list[str]:
    """The drafters to host. Requested ones are all hosted, or start-up fails; by default the usual ones, if any
    of them is not `attached`.

    Raises:
        typer.BadParameter: one needs what is not there.
    """
    # Of the services, which are installed by now.
    from betoken.drafters.registry import SPECS, usual_drafters, why_not_hosted

    if asked is None:
        usual = usual_drafters(models)
        return [] if set(usual) <= set(attached) else list(usual)
    names = [name.strip() for name in asked.split(",") if name.strip()]
    for name in names:
        if reason := why_not_hosted(name):
            raise typer.BadParameter(f"{name!r}: {reason}", param_hint=_DRAFTERS)
    specs = [SPECS[name] for name in names if name in SPECS]
    if lacking := [spec.name for spec in specs if not spec.is_met_by(models)]:
        raise typer.BadParameter(f"{', '.join(lacking)}: needs a draft model; name it by --draft", param_hint=_DRAFTERS)
    if lonely := [spec.name for spec in specs if len(names) <= spec.num_others]:
        text = f"{', '.join(lonely)}: chooses among others, of which there must be two at least"
        raise typer.BadParameter(text, param_hint=_DRAFTERS)
    return names


def attached(asked: str | None, asked_hosted: str | None, verify_options: Sequence[str]) -> tuple[str, ...]:
    """The drafters that verify workers attach; by default the usual ones, unless drafters are named.

    Raises:
        typer.BadParameter: no verify worker can attach one of those asked for.
    """
    from betoken.drafters.registry import check_attached, usual_attached

    if asked is None:
        is_chosen = asked_hosted is not None or any(option.startswith(_ATTACHED) for option in verify_options)
        return () if is_chosen else usual_attached()
    names = tuple(name.strip() for name in asked.split(",") if name.strip())
    try:
        check_attached(names)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=_ATTACHED) from None
    return names


def left_out(drafters: Sequence[str]) -> list[str]:
    """The usual drafters that are not among these."""
    from betoken.drafters.registry import SPECS

    return [spec.name for spec in SPECS.values() if spec.is_usual and spec.name not in drafters]


def check_models_are_used(
    names: Sequence[str], models: SimpleNamespace, weights: Mapping[str, str], *, is_draft_named: bool
) -> None:
    """`names`: hosted and attached drafters.

    Raises:
        typer.BadParameter: a model is named on the command line that no drafter would use.
    """
    from betoken.drafters.registry import SPECS

    used = {SPECS[name].used(models) for name in names if name in SPECS}
    if is_draft_named and models.model and "model" not in used:
        raise typer.BadParameter(f"{models.model}: none of the drafters uses it", param_hint=_DRAFT)
    for name, value in weights.items():
        users = [spec for spec in SPECS.values() if any(option.name == name for option in spec.all_options)]
        is_from_environment = value == os.environ.get(f"BETOKEN_{name.upper()}")  # which workers read in any case
        if not is_from_environment and not any(spec.name in names for spec in users):
            named_by = _DRAFTERS if any(spec.can_host for spec in users) else _ATTACHED
            text = f"{value}: only `{'`, `'.join(spec.name for spec in users)}` uses it, which {named_by} does not name"
            raise typer.BadParameter(text, param_hint=flag(name))


def flag(name: str) -> str:
    """Return the command-line option for a setting."""
    return f"--{name.replace('_', '-')}"


def check_paths(models: Mapping[str, str]) -> None:
    """Check before models load that those named by a path exist; `models` by their options, empty = none.

    Raises:
        typer.BadParameter: one does not.
    """
    for option, model in models.items():
        if model and (fault := path_fault(model)):
            raise typer.BadParameter(f"{model}: {fault}", param_hint=option)


def check_tokenizers(
    target: str, models: Mapping[str, str], router_options: Sequence[str], drafters: Sequence[str] = ()
) -> bool:
    """Check before models load that the target has a tokenizer and drafts would be of its ids; `models` by their
    options. Return whether drafts of the draft model have to be translated, which all `drafters` with a model support.

    Raises:
        typer.BadParameter: it has none, or another model's is different and not translated.
    """
    is_translated = False
    own = _tokenizer_text("--target", target)
    is_elsewhere = any(option.partition("=")[0] == "--tokenizer" for option in router_options)
    if own is None and Path(os.path.expanduser(target)).exists() and not is_elsewhere:
        remedy = "add it, or name a directory that has it: --router-options '--tokenizer DIRECTORY'"
        raise typer.BadParameter(f"{target} has no tokenizer.json: {remedy}", param_hint="--target")
    for option, model in models.items():
        text = _tokenizer_text(option, model) if model and own is not None else None
        difference = "" if text is None else text_difference(cast(str, own), text)
        if difference and option == _DRAFT and _translate(drafters):
            is_translated = True
        elif difference:
            text = f"{model}: not the tokenizer of {target}: {difference}; name a model of the target's family"
            raise typer.BadParameter(text, param_hint=option)
    return is_translated


def _translate(drafters: Sequence[str]) -> bool:
    """Whether all of these drafters that run a model translate its drafts."""
    from betoken.drafters.registry import SPECS  # of the services, which are installed by now

    specs = [SPECS[name] for name in drafters if name in SPECS and SPECS[name].runs_model]
    return bool(specs) and all(spec.translates for spec in specs)


def _tokenizer_text(option: str, model: str) -> str | None:
    try:
        return tokenizer_text(model)
    except (GgufError, OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def split(option: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}", param_hint=option) from None


def router_tls(router_options: Sequence[str], tls: ClientTls) -> ClientTls | None:
    """How to reach the router, None = in plain text; finds out before models load whether it can be reached.

    Raises:
        typer.BadParameter: the router would speak TLS and this command not, or the other way round.
    """
    for name in ("BETOKEN_TLS_CERT_FILE", "BETOKEN_WORKER_TLS_CA_FILE"):
        if os.environ.get(name):
            text = "is for services on several machines; here only the router speaks TLS, by --router-options"
            raise typer.BadParameter(text, param_hint=name)
    if any(option.partition("=")[0] == "--tls-cert-file" for option in router_options):
        if tls.ca_file is None:
            text = "the router would speak TLS: say with --router-tls-ca-file which certificates to trust"
            raise typer.BadParameter(text, param_hint="--router-options")
        if (tls.cert_file is None) != (tls.key_file is None):
            raise typer.BadParameter("goes together with --router-tls-key-file", param_hint="--router-tls-cert-file")
        return tls
    if tls != ClientTls():
        text = "needs --tls-cert-file and --tls-key-file in --router-options"
        raise typer.BadParameter(text, param_hint="--router-tls-...")
    return None


def checked_port(host: str, port: int | None) -> int:
    """The router's port; finds out before models load whether it can be had.

    Raises:
        typer.BadParameter: it cannot; the text says whether because of the host or of the port.
    """
    if host.startswith("unix:"):
        if port:
            raise typer.BadParameter(f"{port}: a Unix socket has no port", param_hint="--port")
        if not is_socket(host) or not Path(host.removeprefix("unix:")).parent.is_dir():
            raise typer.BadParameter(f"{host!r} is not a unix:/PATH in an existing folder", param_hint="--host")
        with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
            probe.connect(host.removeprefix("unix:"))
            raise typer.BadParameter(f"{host}: {os.strerror(errno.EADDRINUSE)}", param_hint="--host")
        return 0
    port = _DEFAULT_PORT if port is None else port
    try:
        _probe(host.strip("[]"), port)
    except (OSError, UnicodeError) as error:
        is_host = isinstance(error, socket.gaierror | UnicodeError) or error.errno == errno.EADDRNOTAVAIL
        reason = getattr(error, "strerror", None) or error
        text, option = (f"{host!r}: {reason}", "--host") if is_host else (f"{host}:{port}: {reason}", "--port")
        raise typer.BadParameter(text, param_hint=option) from None
    return port


def checked_http_port(host: str, port: int | None) -> int:
    """The gateway's port; by default any free one if the usual one is taken.

    Raises:
        typer.BadParameter: the requested port is not available.
    """
    host = LOOPBACK if host.startswith("unix:") else host
    try:
        _probe(host.strip("[]"), DEFAULT_HTTP_PORT if port is None else port)
    except OSError as error:
        if port is not None:
            text = f"{host}:{port}: {error.strerror or error}"
            raise typer.BadParameter(text, param_hint="--http-port") from None
        return 0
    return DEFAULT_HTTP_PORT if port is None else port


def _probe(host: str, port: int) -> None:
    """Listens for a moment on one of the addresses that the host stands for; one is enough, as it is for the router.

    Raises:
        OSError, UnicodeError: the host stands for none, or for none that can be had.
    """
    problems: list[OSError] = []
    for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(place)
            return
        except OSError as error:
            problems.append(error)
    raise problems[0]
