"""`python -m betoken.router`: options, tokenizer, links, server; then serve until stopped."""

from __future__ import annotations

import asyncio
import os

from betoken.router.access.interceptor import KeysFirst
from betoken.router.core import Router
from betoken.router.scopes import RequestScopes
from betoken.router.servicer import GenerationServicer
from betoken.router.settings import RouterSettings
from betoken.router.text.tokenizer import Tokenizer
from betoken.rpc.link import link_credentials
from betoken.rpc.server import Service, freeze_loaded, run_service, serve
from betoken.v1 import generation_pb2_grpc


async def run(settings: RouterSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain.

    Raises:
        FailedPreconditionError: no tokenizer, a TLS file or the file of keys cannot be read, the address cannot be
            bound, or cores not be kept awake.
        InvalidArgumentError: a TLS file is not PEM, or the key is another certificate's.
    """
    if settings.worker_tls is not None:
        link_credentials(settings.worker_tls)  # or no link would ever come up
    router = Router(settings, Tokenizer.load(settings.tokenizer, settings.tokenizer_revision))
    freeze_loaded()
    scopes = RequestScopes(router)
    servicer = GenerationServicer(router, scopes)
    add_servicer = generation_pb2_grpc.add_GenerationServiceServicer_to_server
    service = Service(
        "betoken.v1.GenerationService", servicer, add_servicer, is_available=lambda: router.verify.capacity > 0
    )
    failure: Exception | None = None
    async with asyncio.TaskGroup() as tasks:
        links = tasks.create_task(router.run())
        try:
            await serve(
                [service],
                settings,
                on_drain=router.drain,
                sends_away=True,
                max_connection_age_s=settings.max_connection_age_s,
                interceptors=[KeysFirst(router.keys, scopes.refuse)],
            )
        except Exception as caught:  # raised below: a TaskGroup would wrap it
            failure = caught
        await router.close()
        links.cancel()
    if failure is not None:
        raise failure


def main() -> int:
    """The process's exit status."""
    settings = RouterSettings.parse(program="betoken router")
    return run_service("router", settings, lambda: run(settings))


if __name__ == "__main__":
    # `os._exit`, since `sys.exit` waits for threads: one may tokenize a large text for minutes, in one uninterruptible
    # call.
    os._exit(main())
