"""`python -m betoken.gateway`: options, client, server; then serve until stopped."""

from __future__ import annotations

import asyncio
import logging
import sys

from betoken.client import AsyncClient, BetokenError, RetryPolicy
from betoken.common.logs import configure_logging
from betoken.gateway.app import create_app
from betoken.gateway.server import serve
from betoken.gateway.settings import GatewaySettings

_log = logging.getLogger("betoken.gateway")


async def run(settings: GatewaySettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        BetokenError: the address cannot be listened on, or a TLS file is none.
        OSError: a TLS file for the router cannot be read.
    """
    retry = RetryPolicy(max_outage_s=settings.max_outage_s, retry_while_loading=False)
    # It has no key: callers bring theirs. A key in the environment would serve callers without one.
    client = AsyncClient(
        settings.router, tls=settings.client_tls, retry=retry, timeout_s=settings.request_timeout_s, api_key=""
    )
    async with client:
        await serve(
            create_app(client, settings),
            settings,
            on_ready=lambda port: _log.info("serving on %s, port %d, for %s", settings.host, port, settings.router),
        )


def main() -> int:
    """The process's exit status."""
    settings = GatewaySettings.parse()
    configure_logging(settings.log_level, settings.log_format, captures_stderr=True)
    try:
        import uvloop
    except ImportError:  # Windows
        factory = None
    else:
        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(run(settings))
    except (BetokenError, OSError) as error:
        _log.error("gateway cannot go on: %s", error)
        return 1
    except KeyboardInterrupt:  # while it starts
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
