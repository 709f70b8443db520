"""Reach and protection of a service that is about to listen: one warning for the person who starts it.

Knows settings; opens nothing.
"""

from betoken.common.address import is_own_host
from betoken.rpc.settings import ServiceSettings


def warning_of(settings: ServiceSettings) -> str:
    """Weaknesses of a service that other machines reach; empty without any, or with `--insecure`."""
    if settings.insecure or is_own_host(settings.host):
        return ""
    missing = []
    if settings.server_tls is None:
        missing.append("without TLS, so that others on the way can read and change what is sent (--tls-cert-file)")
    if not settings.knows_callers:
        missing.append(f"for any caller, without a key or client certificate ({settings.caller_options})")
    if not missing:
        return ""
    return f"serving on {settings.host}, beyond this machine, {' and '.join(missing)}; --insecure silences this warning"
