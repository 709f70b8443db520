"""Reads the settings of one sequence's drafter: texts by name, refused with name, value and limit."""

from collections.abc import Collection, Mapping

from betoken.common.errors import InvalidArgumentError


def check_names(settings: Mapping[str, str], known: Collection[str]) -> None:
    """Raises:
    InvalidArgumentError: a setting that the drafter does not know.
    """
    for name in settings:
        if name not in known:
            limit = "must be one of " + ", ".join(known) if known else "must be empty, as this drafter has no settings"
            raise InvalidArgumentError("drafter.settings", name, limit)


def integer(settings: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    """The named setting, `default` where it is absent.

    Raises:
        InvalidArgumentError: the value is not an integer from `lowest` to `highest`.
    """
    text = settings.get(name)
    if text is None:
        return default
    is_number = text.isascii() and text.isdigit() and len(text) <= 9
    if not is_number or not lowest <= int(text) <= highest:
        raise InvalidArgumentError(f"drafter.settings.{name}", text, f"must be an integer from {lowest} to {highest}")
    return int(text)
