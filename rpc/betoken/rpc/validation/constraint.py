"""The limits of `Constraint`, for requests and link entries. Knows sizes, and nothing of what a grammar means."""

from betoken.common.errors import InvalidArgumentError
from betoken.rpc.validation.checks import check_count
from betoken.v1.types_pb2 import Constraint

MAX_CONSTRAINT_BYTES = 1 << 20
"""Limit of workers; routers may have a lower one."""
MAX_CHOICES = 1024


def validate_constraint(constraint: Constraint, max_bytes: int = MAX_CONSTRAINT_BYTES, prefix: str = "") -> None:
    """Check kind and size.

    Raises:
        InvalidArgumentError: no kind, an empty or a too large one; the text begins with `prefix`.
    """
    field = f"{prefix}constraint"
    kind = constraint.WhichOneof("kind")
    if kind is None:
        kinds = ", ".join(each.name for each in Constraint.DESCRIPTOR.oneofs_by_name["kind"].fields)
        raise InvalidArgumentError(field, "absent", f"must have one of {kinds}")
    if kind == "json_object":
        if not constraint.json_object:
            raise InvalidArgumentError(f"{field}.json_object", False, "must be true")
    elif kind == "choice":
        texts = constraint.choice.texts
        check_count(f"{field}.choice.texts", len(texts), 1, MAX_CHOICES)
        for index, text in enumerate(texts):
            check_count(
                f"{field}.choice.texts[{index}]", len(text.encode("utf-8", "surrogatepass")), 1, max_bytes, "bytes"
            )
        check_count(f"{field}.choice", constraint.choice.ByteSize(), 0, max_bytes, "bytes")
    else:
        text = getattr(constraint, kind)
        check_count(f"{field}.{kind}", len(text.encode("utf-8", "surrogatepass")), 1, max_bytes, "bytes")
