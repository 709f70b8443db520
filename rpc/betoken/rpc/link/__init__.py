"""One link = one long-lived bidirectional stream between a router and a worker, carrying frames of entries.

Router side: `VerifyLink`, `DraftLink`. Worker side: `LinkServicer` with a `LinkHandler`.
Neither knows the meaning of entries.
"""

from betoken.rpc.link.loading import LoadingServicer
from betoken.rpc.link.options import LinkCallbacks, LinkOptions, LinkState, link_credentials
from betoken.rpc.link.outbox import OutboxLimits
from betoken.rpc.link.router_side import DraftLink, VerifyLink, WorkerLink
from betoken.rpc.link.stream import PROTOCOL_VERSION
from betoken.rpc.link.worker_side import LinkHandler, LinkPeer, LinkServicer

__all__ = [
    "PROTOCOL_VERSION",
    "DraftLink",
    "LinkCallbacks",
    "LinkHandler",
    "LinkOptions",
    "LinkPeer",
    "LinkServicer",
    "LinkState",
    "LoadingServicer",
    "OutboxLimits",
    "VerifyLink",
    "WorkerLink",
    "link_credentials",
]
