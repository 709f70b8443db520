"""The destination of a service's traces and metrics: its own option, or else OpenTelemetry's variables.

Knows names of variables and forms of endpoints; knows neither providers nor services.
"""

import logging
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

_log = logging.getLogger(__name__)

SIGNALS = ("traces", "metrics")
_OTLP = "OTEL_EXPORTER_OTLP"


def endpoints(own: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Endpoint of each exported signal: `own`, or the environment's.

    Variables that are set and not followed are named in the log.

    Raises:
        ValueError: the environment's is none.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        _log.info("OTEL_SDK_DISABLED: no traces and no metrics are sent")
        return {}
    found = {signal: _endpoint(signal, own, environment) for signal in SIGNALS}
    return {signal: endpoint for signal, endpoint in found.items() if endpoint}


def log_destinations(destinations: Mapping[str, str]) -> None:
    """Put into the log where what goes."""
    if destinations:
        told = " and ".join(f"{signal} to {_shown(endpoint)}" for signal, endpoint in destinations.items())
        _log.info("OpenTelemetry: %s, over gRPC", told)


def exporter_options(endpoint: str, timeout_s: float) -> dict[str, Any]:
    """Arguments of OpenTelemetry's exporters over gRPC, for an endpoint with a scheme or without (HOST:PORT)."""
    scheme = endpoint.partition("://")[0] if "://" in endpoint else ""
    options: dict[str, Any] = {"endpoint": endpoint, "timeout": timeout_s}
    if scheme:  # otherwise its own variable decides, whose default is TLS
        options["insecure"] = scheme == "http"
    if options.get("insecure"):  # as for links: containers inherit a proxy for the web, which knows no collector
        options["channel_options"] = (("grpc.enable_http_proxy", 0),)
    return options


def _endpoint(signal: str, own: str, environment: Mapping[str, str]) -> str:
    """Empty = nowhere."""

    def variable(name: str) -> str:
        for key in (f"{_OTLP}_{signal.upper()}_{name}", f"{_OTLP}_{name}"):
            if value := environment.get(key, "").strip():
                return value
        return ""

    exporter = environment.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip() or "otlp"
    endpoint = own or variable("ENDPOINT")
    if not endpoint or exporter == "none":
        return ""
    if exporter != "otlp":
        _log.warning("OTEL_%s_EXPORTER=%s: %s are sent by OTLP alone", signal.upper(), exporter, signal)
    protocol = variable("PROTOCOL")
    if own or protocol in ("", "grpc"):
        parts = urlsplit(endpoint)
        if "://" in endpoint and not (parts.scheme in ("http", "https") and parts.netloc):
            raise ValueError(
                f"{_OTLP}_ENDPOINT = {endpoint!r}: must be http://HOST:PORT, https://HOST[:PORT] or HOST:PORT"
            )
        return endpoint
    _log.warning(
        "%s_PROTOCOL=%s: %s are not sent to %s; this service speaks OTLP over gRPC, to --otlp-endpoint",
        *(_OTLP, protocol, signal, _shown(endpoint)),
    )
    return ""


def _shown(endpoint: str) -> str:
    """Without a user and a password."""
    host = urlsplit(endpoint).netloc or endpoint
    return host.rpartition("@")[2]
