"""All workers of one router: the drafters that they host between them, and the limits that they share.

Knows handshakes and pools; places no sequences.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from asyncio_pool import AioPool

from betoken.router.workers.draft_pool import DraftPool
from betoken.router.workers.verify_pool import VerifyPool
from betoken.v1.types_pb2 import SourceInfo, WorkerHello


class Fleet:
    """The verify and draft workers."""

    def __init__(self, verify: VerifyPool, draft: DraftPool) -> None:
        self.verify = verify
        self.draft = draft

    async def run(self, probes: AioPool) -> None:
        """Keep links and circuits until cancelled; `probes` bounds how many workers are probed at once."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.verify.run())
            tasks.create_task(self.draft.run(probes))

    async def close(self) -> None:
        """Close all links."""
        await asyncio.gather(self.verify.close(), self.draft.close())

    @property
    def known_drafters(self) -> list[str]:
        """Names of drafters that any worker this router has met hosts or has attached."""
        return list(dict.fromkeys((*self.draft.known_drafters, *self.verify.known_drafters)))

    @property
    def predicting_drafters(self) -> list[str]:
        """Names of known drafters that look up predictions."""
        return list(dict.fromkeys((*self.draft.predicting_drafters, *self.verify.predicting_drafters)))

    @property
    def ready_drafters(self) -> list[str]:
        """Names of drafters that are available now."""
        return list(dict.fromkeys((*self.draft.ready_drafters, *self.verify.ready_drafters)))

    @property
    def sources(self) -> list[SourceInfo]:
        """The sources of draft tokens; one entry a name."""
        return list({source.name: source for source in (*self.draft.sources, *self.verify.sources)}.values())

    def hosted(self, drafter: str) -> str:
        """The name of a request's drafter; empty if no known worker hosts it: a resumed request may name any."""
        return drafter if drafter in self.known_drafters else ""

    def max_draft_tokens(self, model: WorkerHello) -> int:
        """Largest draft that the verify workers and all known draft workers accept; 0 = not known."""
        hellos: Sequence[WorkerHello | None] = [model, *(worker.link.hello for worker in self.draft.workers)]
        limits = (hello.max_draft_tokens for hello in hellos if hello is not None and hello.max_draft_tokens)
        return min(limits, default=0)

    def short_context(self, hello: WorkerHello) -> str:
        """A hint about a draft worker's shorter context; empty without one."""
        served = self.verify.model
        shortest = min(filter(None, (hello.max_context, hello.draft_context)), default=0)
        if served is None or not 0 < shortest < served.hello.max_context:
            return ""
        return f"drafts texts of up to {shortest} tokens only; the target's context is {served.hello.max_context}"
