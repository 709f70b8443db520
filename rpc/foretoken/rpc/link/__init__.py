"""One link = one long-lived bidirectional stream between a router and a worker, carrying frames of entries.

Router side: `VerifyLink`, `DraftLink`. Worker side: `LinkServicer` with a `LinkHandler`.
Neither knows what entries mean.
"""

from foretoken.rpc.link.options import LinkCallbacks, LinkOptions, LinkState, link_credentials
from foretoken.rpc.link.outbox import OutboxLimits
from foretoken.rpc.link.router_side import DraftLink, VerifyLink, WorkerLink
from foretoken.rpc.link.stream import PROTOCOL_VERSION
from foretoken.rpc.link.worker_side import LinkHandler, LinkPeer, LinkServicer

__all__ = [
    "PROTOCOL_VERSION",
    "DraftLink",
    "LinkCallbacks",
    "LinkHandler",
    "LinkOptions",
    "LinkPeer",
    "LinkServicer",
    "LinkState",
    "OutboxLimits",
    "VerifyLink",
    "WorkerLink",
    "link_credentials",
]
