"""The router's options, each declared once.

Knows nothing of how they are used.
"""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from betoken.common.address import UNIX_PREFIX, is_host_port, is_socket
from betoken.common.tls import ClientTls
from betoken.router.request.generation import AUTO_DRAFTER
from betoken.rpc.link.worker_side import MAX_ROUTER_ID_BYTES
from betoken.rpc.settings import CommaSeparated, ExistingFile, ServiceSettings
from betoken.rpc.validation.entries import MAX_OUTCOMES

_BESIDE_PROMPT_BYTES = 1 << 20
"""Room in a message for all but its text."""


class RouterSettings(ServiceSettings):
    """Command line beats `BETOKEN_*` environment beats these defaults."""

    max_metric_tenants: ClassVar[int] = 100
    """Distinct tenants in metrics; later ones are counted as _OTHER. A tenant adds a time series to each metric, and
    without API keys clients name their tenant themselves."""
    max_draft_failures: ClassVar[int] = 3
    """Failed drafts in a row after which a draft worker gets no requests. One failure may be a pause of the machine;
    each costs a wait of --draft-timeout-s."""
    min_probe_pause_s: ClassVar[float] = 0.5
    """Pause before a failed draft worker is probed, seconds; short, because most failures are restarts."""
    max_probe_pause_s: ClassVar[float] = 30.0
    """Longest pause between probes, seconds; it bounds the time in which a recovered worker is not used."""
    max_probes: ClassVar[int] = 4
    """Draft workers probed at once, so that a lost fleet does not receive all probes in one moment."""
    max_reopens: ClassVar[int] = 16
    """Sequences re-opened at once after a worker was lost. Each is a prefill on the remaining workers, which delays
    their own sequences."""

    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 = any free one (see --ready-file).")
    verify: CommaSeparated = Field(description="Verify workers: HOST:PORT or unix:/PATH each; one or more.")
    draft: CommaSeparated = Field((), description="Draft workers, likewise; none = plain decoding.")
    worker_tls_ca_file: ExistingFile | None = Field(
        None, description="PEM certificates that sign acceptable workers; given, all links speak TLS."
    )
    worker_tls_cert_file: ExistingFile | None = Field(
        None, description="PEM certificate of this router, for workers with --tls-client-ca-file."
    )
    worker_tls_key_file: ExistingFile | None = Field(None, description="PEM key of that certificate.")
    worker_tls_server_name: str = Field(
        "", description="Name in the workers' certificates, if it differs from their address's host."
    )
    api_keys_file: ExistingFile | None = Field(
        None,
        description="TOML file of accepted API keys, as hashes, with their tenants and limits (`betoken"
        " new-key` makes one); absent = no keys required. A changed file needs no restart.",
    )
    weights_fingerprint: str = Field(
        "",
        pattern=r"^([0-9a-f]{16,64})?$",
        description="Weights that verify workers must serve: what `betoken info --json` shows, or 16 first digits and"
        " more; empty = determined by the first worker.",
    )
    allow_weights_change: bool = Field(
        False,
        description="Whether verify workers with other weights may take over once none with the first ones is ready;"
        " otherwise they are rejected until the router restarts.",
    )
    tokenizer: str = Field(
        min_length=1,
        description="The target's GGUF file, of this machine or of the hub (OWNER/NAME:Q4_K_M), or a directory or"
        " hub id with its tokenizer.json and chat template.",
    )
    tokenizer_revision: str | None = Field(None, min_length=1, description="Hub revision of the tokenizer.")
    model: str = Field("", description="Model id the verify workers must announce; empty = whatever they serve.")
    router_id: str = Field(
        "router", min_length=1, description="Name of this router in workers' logs, traces and metrics."
    )

    max_concurrency: int = Field(256, ge=1, le=65536, description="Requests generated at once.")
    max_answers: int = Field(128, ge=1, le=1024, description="Most answers of one request (n).")
    max_queue: int = Field(1024, ge=0, le=65536, description="Requests that may wait to be admitted; more are refused.")
    queue_timeout_s: float = Field(30.0, gt=0, le=3600, description="Longest wait for admission, seconds.")
    max_prompt_bytes: int = Field(
        8 << 20,
        ge=1 << 10,
        le=1 << 29,
        description="Largest text of a request, bytes: a prompt, or a chat's messages and what the template makes of"
        " them. Messages of clients are accepted up to 1 MiB more, and --max-message-bytes.",
    )
    max_constraint_bytes: int = Field(
        1 << 16,
        ge=1 << 8,
        le=1 << 20,
        description="Largest constraint of a request, bytes: a JSON schema, a regular expression, a grammar.",
    )
    constraint_timeout_s: float = Field(
        5.0, gt=0, le=60, description="Longest time to compile a request's constraint, seconds; more refuses it."
    )
    max_waiting_bytes: int = Field(
        64 << 20,
        ge=1 << 16,
        le=1 << 40,
        description="Bytes of all requests together that are read or wait to be admitted; more are refused.",
    )
    max_request_s: float = Field(
        3600.0, gt=0, le=86400, description="Longest request, seconds, whatever the client's deadline."
    )
    max_messages_per_s: int = Field(
        2000,
        ge=1,
        le=1_000_000,
        description="Messages per second to all clients together, about; with N streams each gets one in N / this.",
    )
    max_connection_age_s: float = Field(
        0.0,
        ge=0,
        le=86400,
        description="Seconds, about, after which a client connects anew for its next calls, perhaps to another router"
        " behind the same name; 0 = never.",
    )
    ready_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="How long a request waits while no verify worker has been met yet, seconds."
    )

    drafter: str = Field(
        AUTO_DRAFTER,
        description="Drafter of requests that name none; auto = per sequence the fastest of all that workers host or"
        " have attached, none = decode without speculation.",
    )
    num_draft_tokens: int = Field(
        0,
        ge=0,
        le=64,
        description="Default number of draft tokens per round; 0 = adaptive, chosen per round by cost.",
    )
    drafts_must_pay: bool = Field(
        True,
        description="Whether requests that leave the draft length open go without drafts while that is faster; it is"
        " tried now and then.",
    )
    overlap: Literal["off", "on", "auto"] = Field(
        "auto",
        description="Whether draft workers draft ahead while the target verifies (overlapped rounds); it pays off if"
        " they share neither cores nor a device with verify workers. auto = while measured times say so, by drafter.",
    )
    overlap_outcomes: int = Field(
        3,
        ge=1,
        le=MAX_OUTCOMES,
        description="Most outcomes of each verification that are drafted ahead for with --overlap on or auto.",
    )
    draft_timeout_s: float = Field(
        0.5,
        gt=0,
        le=60,
        description="Longest wait for a draft, seconds; later the round goes on. If eight decode steps take longer,"
        " they are the limit, up to --first-draft-timeout-s.",
    )
    first_draft_timeout_s: float = Field(
        3.0,
        gt=0,
        le=600,
        description="Longest wait for the first draft, which includes the prompt's prefill, in the modes REJECTION and"
        " TYPICAL and of probes, seconds.",
    )

    verify_timeout_s: float = Field(
        60.0,
        gt=0,
        le=3600,
        description="Longest wait for a result without a sign of work, before the sequence is re-opened, seconds.",
    )
    failover_timeout_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="How long a sequence whose verify worker was lost waits while none can be re-opened, seconds.",
    )

    @property
    def max_request_bytes(self) -> int:
        """Largest message of a client, bytes; larger messages are not received."""
        return min(self.max_message_bytes, self.max_prompt_bytes + _BESIDE_PROMPT_BYTES)

    @property
    def num_outcomes(self) -> int:
        """Most outcomes of each verification that are drafted ahead for; 0 = rounds are never overlapped."""
        return self.overlap_outcomes if self.overlap != "off" else 0

    @property
    def knows_callers(self) -> bool:
        """Whether callers show who they are."""
        return self.api_keys_file is not None or super().knows_callers

    @property
    def caller_options(self) -> str:
        """The options of which one makes it so."""
        return f"--api-keys-file or {super().caller_options}"

    @property
    def instance_id(self) -> str:
        return self.router_id if "router_id" in self.model_fields_set else ""  # else several have the same

    @property
    def worker_tls(self) -> ClientTls | None:
        """How to dial workers that speak TLS, or None for plain text."""
        if self.worker_tls_ca_file is None:
            return None
        files = (self.worker_tls_ca_file, self.worker_tls_cert_file, self.worker_tls_key_file)
        return ClientTls(*files, server_name=self.worker_tls_server_name)

    @model_validator(mode="after")
    def _check_worker_tls(self) -> Self:
        if (self.worker_tls_cert_file is None) != (self.worker_tls_key_file is None):
            raise ValueError("--worker-tls-cert-file and --worker-tls-key-file go together")
        if self.worker_tls_ca_file is None and (self.worker_tls_cert_file or self.worker_tls_server_name):
            raise ValueError("--worker-tls-cert-file and --worker-tls-server-name need --worker-tls-ca-file")
        return self

    @field_validator("router_id")
    @classmethod
    def _check_router_id(cls, value: str) -> str:
        if len(value.encode()) > MAX_ROUTER_ID_BYTES:  # workers would refuse it
            raise ValueError(f"must be at most {MAX_ROUTER_ID_BYTES} bytes")
        return value

    @field_validator("verify", "draft")
    @classmethod
    def _check_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for address in value:
            if not is_host_port(address) and not is_socket(address):
                raise ValueError(f"{address!r} is neither HOST:PORT nor {UNIX_PREFIX}/PATH")
        if len(set(value)) != len(value):
            raise ValueError("an address is named twice")
        return value

    @field_validator("verify")
    @classmethod
    def _check_any(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("at least one verify worker is needed")
        return value
