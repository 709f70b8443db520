"""Options of every service: one frozen settings class per service, built on `ServiceSettings`.

The command line beats `BETOKEN_*` environment variables, which beat the defaults. Lists are comma-separated. An empty
value stands for the default. A bad value stops start-up with the option's name. Knows no service.
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, cast
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    Field,
    FilePath,
    HttpUrl,
    ValidationError,
    WrapValidator,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, NoDecode, SettingsConfigDict

from betoken.common.address import MAX_UNIX_PATH_BYTES, UNIX_PREFIX, is_socket
from betoken.common.logs import LogFormat
from betoken.common.option_errors import PLACEHOLDERS, described_faults
from betoken.common.tls import ServerTls
from betoken.rpc.progress import LONGEST_SUFFIX

ENV_PREFIX = "BETOKEN_"


def _split(value: Any) -> Any:
    """The parts of a comma-separated text, or of a list of such (the command line gives a list)."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return value
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


CommaSeparated = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""Type of a list option: `--verify a:1,b:2`, or the option repeated."""


def _os_error_refused(value: Any, validate: Callable[[Any], Any]) -> Any:
    """A folder above that may not be entered, or a name that is too long, is a bad value as any other."""
    try:
        return validate(value)
    except OSError as error:
        raise ValueError(f"cannot be looked at: {error.strerror}") from error


ExistingFile = Annotated[FilePath, WrapValidator(_os_error_refused)]
"""Type of an option that names a file."""


def _usable_ready_file(path: Path) -> Path:
    if not path.parent.is_dir():
        raise ValueError(f"{str(path.parent)!r} is not a directory")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"{str(path)!r} is not a writable file")
    limit = os.pathconf(path.parent, "PC_NAME_MAX") - len(LONGEST_SUFFIX)
    if (length := len(os.fsencode(path.name))) > limit:
        raise ValueError(f"a name of {length} bytes; at most {limit}, because related files have longer names")
    return path


class _CommandLine(CliSettingsSource[Any]):
    """Shows placeholders in place of Python's types."""

    def _metavar_format(self, obj: Any) -> str:
        return PLACEHOLDERS.get(text := super()._metavar_format(obj), text)


class ServiceSettings(BaseSettings):
    """The options all services share. Subclass with more fields; read with `parse`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
        protected_namespaces=(),
    )

    host: str = Field(
        "127.0.0.1", description="Address to listen on; 0.0.0.0 or [::] for all; unix:/PATH = a socket of this machine."
    )
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 = any free one (see --ready-file).")
    ready_file: Path | None = Field(
        None, description='File to write {"port": ..., "pid": ...} to once the service takes requests.'
    )
    tls_cert_file: ExistingFile | None = Field(
        None, description="PEM certificate chain; with --tls-key-file: speak TLS. Renewed files need no restart."
    )
    tls_key_file: ExistingFile | None = Field(None, description="PEM private key of the certificate, unencrypted.")
    tls_client_ca_file: ExistingFile | None = Field(
        None, description="PEM certificates that sign acceptable clients (mutual TLS)."
    )
    insecure: bool = Field(
        False, description="No warning where other machines reach the service and it lacks TLS or callers' keys."
    )
    reflection: bool = Field(True, description="Describe the service to tools such as grpcurl (gRPC reflection).")
    max_message_bytes: int = Field(
        64 << 20,
        ge=1 << 16,
        le=1 << 30,
        description="Largest gRPC message sent or accepted, bytes; workers no less than the router.",
    )
    max_concurrent_rpcs: int = Field(
        2048, ge=1, le=1 << 20, description="Concurrent calls, health checks excluded; more are rejected."
    )
    max_connections: int = Field(1024, ge=1, le=1 << 20, description="Connections accepted at once.")
    max_connection_streams: int = Field(
        1024, ge=1, le=1 << 20, description="Calls under way on one connection; its client holds back more."
    )
    max_unread_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="Maximum time in which a client may leave an answer unread before the call ends, seconds.",
    )
    drain_grace_s: float = Field(
        10.0, ge=0, le=3600, description="On SIGTERM: how long running work may take to finish, seconds."
    )
    fast_wake: Literal["auto", "on", "off"] = Field(
        "auto",
        description="While requests run, keep idle cores of this machine awake: rounds are shorter, at the price"
        " of power; auto = where /dev/cpu_dma_latency can be written.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: LogFormat = Field(
        "text", description="Form of every line of the log: text, or json = an object a line."
    )
    otlp_endpoint: str = Field(
        "",
        description="OTLP/gRPC endpoint for traces and metrics, e.g. http://localhost:4317 (by no proxy) or https://...;"
        " empty = OTEL_EXPORTER_OTLP_ENDPOINT, if set.",
    )
    metrics_interval_s: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="Interval of metric export, seconds; default: OTEL_METRIC_EXPORT_INTERVAL.",
    )

    @model_validator(mode="before")
    @classmethod
    def _take_default_for_empty(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != ""}

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str) -> str:
        if value.startswith(UNIX_PREFIX) and not is_socket(value):
            limit = f"{UNIX_PREFIX}/PATH of at most {MAX_UNIX_PATH_BYTES} bytes without ? # % and commas"
            raise ValueError(f"{value!r} is not {limit}")
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_otlp_endpoint(cls, value: str) -> str:
        try:
            url = HttpUrl(value) if value else None
        except ValueError:
            url = None
        # A user would be looked up as part of the host, and without a port gRPC dials 443, in plain text too.
        is_more = url is not None and ((url.path or "/") != "/" or url.query or url.fragment or "@" in value)
        if value and (url is None or is_more or (url.scheme == "http" and urlsplit(value).port is None)):
            raise ValueError("must be http://HOST:PORT or https://HOST[:PORT]")
        return value

    @field_validator("ready_file")
    @classmethod
    def _check_ready_file(cls, value: Path | None) -> Path | None:
        return None if value is None else cast(Path, _os_error_refused(value, _usable_ready_file))

    @model_validator(mode="after")
    def _check_port(self) -> Self:
        if self.host.startswith(UNIX_PREFIX) and self.port and "port" in self.model_fields_set:
            raise ValueError(f"--port {self.port}: a Unix socket has no port")
        return self

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("--tls-cert-file and --tls-key-file go together")
        if self.tls_client_ca_file is not None and self.tls_cert_file is None:
            raise ValueError("--tls-client-ca-file needs --tls-cert-file and --tls-key-file")
        return self

    @property
    def max_request_bytes(self) -> int:
        """Largest message that is received, bytes."""
        return self.max_message_bytes

    @property
    def knows_callers(self) -> bool:
        """Whether callers show who they are."""
        return self.tls_client_ca_file is not None

    @property
    def caller_options(self) -> str:
        """The options of which one makes it so."""
        return "--tls-client-ca-file"

    @property
    def instance_id(self) -> str:
        """Its name among its like; empty = not given."""
        return ""

    @property
    def telemetry(self) -> tuple[str, float | None, str]:
        """Endpoint, interval of metrics (None = not given) and instance, as `telemetry.configure` takes them."""
        interval_s = self.metrics_interval_s if "metrics_interval_s" in self.model_fields_set else None
        return self.otlp_endpoint, interval_s, self.instance_id

    @property
    def server_tls(self) -> ServerTls | None:
        """The TLS files, or None for plain text."""
        if self.tls_cert_file is None or self.tls_key_file is None:
            return None
        return ServerTls(self.tls_cert_file, self.tls_key_file, self.tls_client_ca_file)

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None, *, program: str | None = None) -> Self:
        """Settings from the command line (default: this process's), the environment and the defaults.

        Raises:
            SystemExit: `--help` was asked for (0), or an option is unknown or has a bad value (2, named on stderr).
        """
        source = _CommandLine(cls, cli_prog_name=program)
        argv = list(sys.argv[1:] if arguments is None else arguments)
        try:
            return CliApp.run(cls, cli_args=argv, cli_settings_source=source)
        except ValidationError as error:
            meanings = {name: field.description for name, field in cls.model_fields.items()}
            name = program or Path(sys.argv[0]).name
            faults = described_faults(error.errors(include_url=False), name, ENV_PREFIX, meanings)
            sys.stderr.write(f"{faults}\n")
            raise SystemExit(2) from None
