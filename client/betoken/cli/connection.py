"""How the commands reach a router: the options they share, and what becomes of errors.

Knows no command.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from betoken.client import (
    BetokenError,
    Client,
    ClientTls,
    InvalidArgumentError,
    ResourceExhaustedError,
    RetryPolicy,
)
from betoken.client.channel import DEFAULT_ADDRESS
from betoken.common.api_key import API_KEY_VARIABLE, check_api_key
from betoken.common.logs import escaped

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
PANEL = "Connection"
_OPTIONS = (
    (r"constraint\.choice\..*", "--choice"),
    (r"messages\.continue_final_message$|continue_final_message$", "--begin"),
    (r"messages\.escape_special_tokens$", "--escape-special-tokens"),
    (r"add_special_tokens$", "--no-special-tokens"),
    (r"prompt_ids\b.*", "--prompt-ids"),
    (r"infill\b.*", "--suffix"),
    (r"(prompt|message)$", "PROMPT"),
    (r"api_key$", f"--api-key-file, {API_KEY_VARIABLE}"),
    (r"messages\[0\].*", "PROMPT or --system"),
    (r"messages\b.*", "PROMPT"),
    (r"sampling\.stop_token_ids\b.*", "--stop-token-id"),
    (r"speculation\.drafter\.settings\.(.*)", r"--drafter-setting \1"),
    (r"speculation\.drafter\.settings\b.*", "--drafter-setting"),
    (r"speculation\.drafter\b.*", "--drafter"),
)
"""Fields of the SDK whose option is not called like them."""
# A person waits to hear that the router is away, or that the router waits for a worker.
_RETRY = RetryPolicy(max_retries=5, max_outage_s=3.0)
TIMEOUT_S = typer.Option(min=0.001, help="Deadline of the whole command, seconds.", rich_help_panel=PANEL)


@dataclass(frozen=True, kw_only=True)
class Connection:
    """The options that every command has which asks a router, each declared once, and their values."""

    address: Annotated[
        str, typer.Option(envvar="BETOKEN_ADDRESS", help="The router, HOST:PORT.", rich_help_panel=PANEL)
    ] = DEFAULT_ADDRESS
    tls: Annotated[
        bool, typer.Option("--tls", help="Speak TLS; implied by the other TLS options.", rich_help_panel=PANEL)
    ] = False
    tls_ca_file: Annotated[
        Path | None, typer.Option(help="PEM certificates that sign acceptable routers.", rich_help_panel=PANEL)
    ] = None
    tls_cert_file: Annotated[
        Path | None, typer.Option(help="PEM certificate of this client.", rich_help_panel=PANEL)
    ] = None
    tls_key_file: Annotated[Path | None, typer.Option(help="PEM key of that certificate.", rich_help_panel=PANEL)] = (
        None
    )
    tls_server_name: Annotated[
        str, typer.Option(help="Name in the router's certificate, if it differs from the host.", rich_help_panel=PANEL)
    ] = ""
    api_key_file: Annotated[
        Path | None,
        typer.Option(help=f"File with the API key; absent = the one in {API_KEY_VARIABLE}.", rich_help_panel=PANEL),
    ] = None
    timeout_s: Annotated[float, TIMEOUT_S] = 600.0

    def client(self) -> Client:
        """A client of that router.

        Raises:
            InvalidArgumentError: the address is malformed, or a file of a certificate or key cannot be read or used.
        """
        files = (self.tls_ca_file, self.tls_cert_file, self.tls_key_file)
        has_tls = self.tls or any(files) or bool(self.tls_server_name)
        tls = ClientTls(*files, server_name=self.tls_server_name) if has_tls else None
        key = None if self.api_key_file is None else read_key(self.api_key_file)
        try:
            return Client(self.address, tls=tls, retry=_RETRY, timeout_s=self.timeout_s, api_key=key)
        except OSError as error:
            names = {str(file): name for file, name in zip(files, ("ca_file", "cert_file", "key_file"), strict=True)}
            field = f"tls.{names[str(error.filename)]}"
            raise InvalidArgumentError(field, error.filename, f"cannot be read ({error.strerror})") from None


def read_key(file: Path) -> str:
    """Return the API key in a file.

    Raises:
        InvalidArgumentError: the file cannot be read, or holds no key.
    """
    try:
        return check_api_key(file.read_text().strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no text"
        raise InvalidArgumentError("api_key_file", str(file), f"cannot be read ({reason})") from None


@contextmanager
def reported_errors(connection: Connection | None, as_json: bool) -> Iterator[None]:
    """Ends the command with one line (or one JSON object) about what went wrong; interrupted, quietly.

    `connection`: None for a command without a router.

    Raises:
        typer.Exit: in place of the error.
    """
    try:
        yield
        sys.stdout.flush()  # write errors are reported here instead of by the interpreter at exit
    except KeyboardInterrupt:
        sys.stderr.write("\ncancelled\n")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # whoever read our output has seen enough
        raise typer.Exit(EXIT_FAILED) from None
    except (BetokenError, OSError) as error:
        if as_json and isinstance(error, BetokenError):
            print(json.dumps({"error": _error_fields(error)}))
        else:
            sys.stderr.write(f"betoken: {_described(error, connection)}\n")
        raise typer.Exit(EXIT_FAILED) from None
    finally:
        let_go_of_output()


def let_go_of_output() -> None:
    """The interpreter writes the rest at exit; if that fails it reports it again and exits with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            with suppress(OSError):
                stream.close()


def in_options(error: BetokenError, prefix: str = "--") -> str:
    """The error's text with the option that a value came from in place of the SDK's field."""
    if not isinstance(error, InvalidArgumentError) or not error.field:
        return error.message
    return f"{option_of(error.field, prefix)} = {error.value}: {error.limit}"


def option_of(field: str, prefix: str = "--") -> str:
    """The option that sets a field; `prefix` starts the names of connection options."""
    for pattern, option in _OPTIONS:
        if re.match(pattern, field):
            return re.sub(pattern, option, field)
    group, _, name = field.partition(".")
    if group == "tls":
        return f"{prefix}{field.replace('.', '-').replace('_', '-').removesuffix('-')}"
    name = (name or group).partition("[")[0]
    return f"--{name.replace('_', '-')}"


def _described(error: Exception, connection: Connection | None) -> str:
    if not isinstance(error, BetokenError):
        return str(error)
    router = f" (router {connection.address})" if connection is not None else ""
    text = escaped(f"{error.code.name}: {in_options(error)}{router}")
    return f"{text}, request {error.request_id}" if error.request_id else text


def _error_fields(error: BetokenError) -> dict[str, object]:
    fields: dict[str, object] = {"code": error.code.name, "message": error.message, "request_id": error.request_id}
    if isinstance(error, InvalidArgumentError):
        fields |= {"field": error.field, "value": error.value, "limit": error.limit}
    if isinstance(error, ResourceExhaustedError):
        fields["retry_after_s"] = error.retry_after_s
    if error.partial is not None:
        fields["partial"] = {
            name: getattr(error.partial, name) for name in ("text", "output_ids", "seed", "system_fingerprint")
        }
    return fields
