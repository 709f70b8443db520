"""The gateway's options, each declared once: the command line beats `BETOKEN_*` beats the defaults.

Reads its options like all services.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, FilePath, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, NoDecode, SettingsConfigDict

from betoken.client import ClientTls
from betoken.common.address import is_target
from betoken.common.logs import LogFormat
from betoken.common.option_errors import PLACEHOLDERS, described_faults
from betoken.gateway.speculative_metrics import Level

ENV_PREFIX = "BETOKEN_"


def _split(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return value
    return tuple(part.strip() for text in texts for part in text.split(",") if part.strip())


class _CommandLine(CliSettingsSource[Any]):
    """Shows placeholders in place of Python's types."""

    def _metavar_format(self, obj: Any) -> str:
        return PLACEHOLDERS.get(text := super()._metavar_format(obj), text)


class GatewaySettings(BaseSettings):
    """Options of the gateway; read with `parse`."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        cli_show_env_vars=True,
    )

    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 or :: for all.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 = any free one (see --ready-file).")
    router: str = Field("127.0.0.1:50051", description="The router: HOST:PORT, unix:/PATH or dns:///HOST:PORT.")
    router_tls: bool = Field(False, description="Speak TLS to the router; implied by the files below.")
    router_tls_ca_file: FilePath | None = Field(None, description="PEM certificates that sign acceptable routers.")
    router_tls_cert_file: FilePath | None = Field(None, description="PEM certificate shown to the router.")
    router_tls_key_file: FilePath | None = Field(None, description="PEM key of that certificate.")
    router_tls_server_name: str = Field(
        "", description="Name in the router's certificate, if it differs from its address's host."
    )
    tls_cert_file: FilePath | None = Field(None, description="PEM certificate chain; with the key: speak HTTPS.")
    tls_key_file: FilePath | None = Field(None, description="PEM private key of the certificate, unencrypted.")
    ready_file: Path | None = Field(
        None, description='File to write {"port": ..., "pid": ...} to once requests are taken.'
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (),
        description="Names of the model at this gateway, the one in responses first; the router's model id is accepted,"
        " too. Default: that id.",
    )
    ignore_unknown_fields: bool = Field(
        False,
        description="Ignore unknown fields of a request's body, and name them in the header `warning` of the response;"
        " otherwise they are rejected.",
    )
    per_request_spec_decode_metrics: Level = Field(
        "none",
        description="Acceptance of each completion and chat in its response, as vLLM's option of this name:"
        " metrics.speculative_decoding, `detailed` with one number per round.",
    )
    page: bool = Field(True, description="Whether there is a page at /.")
    allowed_origins: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (), description="Origins whose pages may ask (CORS), such as https://chat.example; * = all."
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)] = Field(
        (),
        description="Names that requests may be addressed to besides localhost and addresses, such as chat.example or"
        " *.example; * = all.",
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, le=64 << 20, description="Largest body of a request, bytes.")
    body_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="How long a request's headers, and then its body, may take to arrive, seconds."
    )
    max_requests: int = Field(1024, ge=1, le=1 << 20, description="Requests answered at once; more are refused (503).")
    max_incomplete_bodies: int = Field(
        256, ge=1, le=1 << 20, description="Bodies that may be arriving at once; more end the oldest (503)."
    )
    max_incomplete_body_bytes: int = Field(
        64 << 20, ge=1024, le=1 << 40, description="Bytes of bodies that are arriving; more end the oldest (503)."
    )
    max_idle_connections: int = Field(
        1024, ge=1, le=1 << 20, description="Connections without a request in progress; more close the oldest."
    )
    max_unread_s: float = Field(
        60.0, gt=0, le=86400, description="How long a client may leave an answer unread, seconds."
    )
    max_choices: int = Field(
        128, ge=1, le=4096, description="Most answers of one request: n times the number of prompts."
    )
    request_timeout_s: float = Field(600.0, gt=0, le=86400, description="Deadline of an answer, seconds.")
    max_outage_s: float = Field(
        30.0, ge=0, le=3600, description="How long an answer waits for a router that is gone, seconds."
    )
    drain_grace_s: float = Field(
        10.0, ge=0, le=3600, description="On SIGTERM: how long answers may take to finish, seconds."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level logged.")
    log_format: LogFormat = Field(
        "text", description="Form of every line of the log: text, or json = an object a line."
    )

    @model_validator(mode="before")
    @classmethod
    def _take_default_for_empty(cls, values: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in values.items() if value != ""}

    @field_validator("router")
    @classmethod
    def _check_router(cls, value: str) -> str:
        if not is_target(value):
            raise ValueError("must be HOST:PORT, unix:/PATH or dns:///HOST:PORT")
        return value

    @field_validator("ready_file")
    @classmethod
    def _check_ready_file(cls, value: Path | None) -> Path | None:
        if value is not None and (not value.parent.is_dir() or value.is_dir()):
            raise ValueError("must be a file in a directory that exists")
        return value

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for prefix in ("", "router_"):
            files = [getattr(self, f"{prefix}tls_{kind}_file") for kind in ("cert", "key")]
            if (files[0] is None) != (files[1] is None):
                option = f"--{prefix}tls".replace("_", "-")
                raise ValueError(f"{option}-cert-file and {option}-key-file go together")
        return self

    @property
    def client_tls(self) -> ClientTls | None:
        """How to reach the router; None = plain text."""
        files = (self.router_tls_ca_file, self.router_tls_cert_file, self.router_tls_key_file)
        if not (self.router_tls or any(files) or self.router_tls_server_name):
            return None
        return ClientTls(*files, server_name=self.router_tls_server_name)

    @classmethod
    def parse(cls, arguments: Sequence[str] | None = None) -> Self:
        """Settings from the command line (default: this process's), the environment and the defaults.

        Raises:
            SystemExit: `--help` was asked for (0), or an option is unknown or has a bad value (2, named on stderr).
        """
        source = _CommandLine(cls, cli_prog_name="betoken gateway")
        argv = list(sys.argv[1:] if arguments is None else arguments)
        try:
            return CliApp.run(cls, cli_args=argv, cli_settings_source=source)
        except ValidationError as error:
            meanings = {name: field.description for name, field in cls.model_fields.items()}
            faults = described_faults(error.errors(include_url=False), "betoken gateway", ENV_PREFIX, meanings)
            sys.stderr.write(f"{faults}\n")
            raise SystemExit(2) from None
