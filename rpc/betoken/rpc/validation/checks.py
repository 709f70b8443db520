"""The few kinds of limits there are; each refusal is an `InvalidArgumentError`. Knows no messages."""

from collections.abc import Iterable, Sequence

from betoken.common.errors import InvalidArgumentError
from betoken.common.float32 import shortest


def check_range(field: str, value: int, low: int, high: int) -> None:
    """`low <= value <= high`."""
    if not low <= value <= high:
        raise InvalidArgumentError(field, value, f"must be {low} to {high}")


def check_float(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> None:
    """`low <= value <= high` (`low < value` with `above_low`) of the decimal the sender wrote; refuses NaN and inf."""
    value = shortest(value)
    if not (low < value if above_low else low <= value) or not value <= high:
        limit = f"must be above {low:g} and at most {high:g}" if above_low else f"must be {low:g} to {high:g}"
        raise InvalidArgumentError(field, value, limit)


def check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    """Every id below `vocab_size`; names the first that is not."""
    if ids and max(ids) >= vocab_size:
        index, value = next((index, value) for index, value in enumerate(ids) if value >= vocab_size)
        raise InvalidArgumentError(f"{field}[{index}]", value, f"must be below the vocabulary size {vocab_size}")


def check_count(field: str, count: int, low: int, high: int, unit: str = "entries") -> None:
    """`low <= count <= high` for the number of entries of a field, or the length of a text in bytes."""
    if count > high:
        raise InvalidArgumentError(field, f"{count} {unit}", f"must be at most {high}")
    if count < low:
        raise InvalidArgumentError(field, f"{count} {unit}", f"must be at least {low}")


def check_enum(field: str, value: int, known: Iterable[int]) -> None:
    """`value` is one of the enum's numbers this version knows."""
    known = sorted(known)
    if value not in known:
        raise InvalidArgumentError(field, value, f"must be one of {', '.join(map(str, known))}")


def check_text(field: str, text: str, max_bytes: int) -> None:
    """At most `max_bytes` of UTF-8."""
    num_bytes = len(text.encode("utf-8", "surrogatepass"))
    check_count(field, num_bytes, 0, max_bytes, "bytes")
