"""Which draft tokens stay: an equality test along chains and trees, or the longest path of accepted nodes. It knows
ids and numbers only."""

from betoken.kernels.accept.longest import longest_path
from betoken.kernels.accept.reference import accept_block

__all__ = ["accept_block", "longest_path"]
