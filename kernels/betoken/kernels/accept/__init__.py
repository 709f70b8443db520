"""Which draft tokens are the target's own: an equality test along chains and trees. It knows ids only."""

from betoken.kernels.accept.reference import accept_block

__all__ = ["accept_block"]
