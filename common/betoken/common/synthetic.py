"""Arithmetic of synthetic workers: tokens of a simulated target, seeded draws, and step times by tokens.

All values are pure functions of positions and ids, so that answers repeat and do not depend on batches.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields
from itertools import pairwise
from math import isfinite

from betoken.common.step_times import StepTimes

PREFIX = "synthetic:"
"""First part of the model id of a synthetic target."""
NUM_IDS = 64
"""Ids that a synthetic target emits: the first ones of its vocabulary, except end ids."""
MAX_STEP_MS = 60_000.0
_MASK = (1 << 64) - 1


def next_id(position: int, previous_id: int, end_ids: Collection[int]) -> int:
    """Return the synthetic target's token at `position` after `previous_id`; never one of `end_ids`."""
    token_id = _mixed(position, previous_id) % NUM_IDS
    for _ in range(NUM_IDS):
        if token_id not in end_ids:
            break
        token_id = (token_id + 1) % NUM_IDS
    return token_id


def other_id(token_id: int, end_ids: Collection[int]) -> int:
    """Return an id that a synthetic target emits, but not `token_id`."""
    ids = ((token_id + offset) % NUM_IDS for offset in range(1, NUM_IDS))
    return next((other for other in ids if other not in end_ids), (token_id + 1) % NUM_IDS)


def is_drawn(probability: float, *keys: int) -> bool:
    """Draw an event of this probability from a generator keyed by `keys`, such as a seed and a position."""
    return _mixed(*keys) / (_MASK + 1) < probability


def _mixed(*keys: int) -> int:
    """Hash integers to 64 bits. Source: the finalizer of SplitMix64, Steele, Lea and Flood, OOPSLA 2014."""
    value = 0
    for key in keys:
        value = (value + key + 0x9E3779B97F4A7C15) & _MASK
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
        value ^= value >> 31
    return value


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """Given times of a forward by its number of tokens."""

    points: tuple[tuple[int, float], ...]
    """Tokens, ascending, and milliseconds."""

    @classmethod
    def parse(cls, text: str) -> SimulatedTimes:
        """Read a constant (`20`) or a table of tokens and times (`1:20,8:21.5,64:40`), milliseconds.

        Raises:
            ValueError: the text is neither, or a number is outside its range.
        """
        parts = [part.rpartition(":") for part in text.split(",")]
        if len(parts) > 1 and not all(tokens for tokens, _, _ in parts):
            raise ValueError(f"{text!r} is neither a number nor a table TOKENS:MS,TOKENS:MS")
        try:
            points = tuple((int(tokens or 1), float(ms)) for tokens, _, ms in parts)
        except ValueError:
            raise ValueError(f"{text!r} is neither a number nor a table TOKENS:MS,TOKENS:MS") from None
        for _, ms in points:
            if not (isfinite(ms) and 0 <= ms <= MAX_STEP_MS):
                raise ValueError(f"{ms:g} ms: must be 0 to {MAX_STEP_MS:g}")
        if points[0][0] < 1 or any(low >= high for (low, _), (high, _) in pairwise(points)):
            raise ValueError(f"{text!r}: numbers of tokens must ascend from at least 1")
        return cls(points)

    def seconds(self, num_tokens: int) -> float:
        """Return the time of a forward: interpolated linearly, constant outside the table."""
        (first, _), (last, last_ms) = self.points[0], self.points[-1]
        table = StepTimes(
            [*((tokens, round(1e6 * ms)) for tokens, ms in self.points), (last + 1, round(1e6 * last_ms))]
        )
        return 1e-9 * table.ns(min(max(num_tokens, first), last))


def probabilities(text: str) -> tuple[float, ...]:
    """Read one probability, or one per position separated by commas; the last holds for all later positions.

    Raises:
        ValueError: a part is not a number from 0 to 1.
    """
    values = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            raise ValueError(f"{part!r} is not a number") from None
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{value:g}: must be 0 to 1")
        values.append(value)
    return tuple(values)


def probability(text: str) -> float:
    """Read one probability.

    Raises:
        ValueError: it is not a number from 0 to 1.
    """
    values = probabilities(text)
    if len(values) > 1:
        raise ValueError(f"{text!r}: must be one number from 0 to 1")
    return values[0]


@dataclass(frozen=True, slots=True)
class Simulation:
    """Times and drafts of a synthetic worker."""

    step_ms: str
    """Time of a forward, milliseconds, or a table by tokens; see `SimulatedTimes.parse`."""
    link_ms: float = 0.0
    """Round trip that the link adds, milliseconds."""
    acceptance: str = "0.8"
    """Draft workers: acceptance probability of a draft token if all before it are accepted; one, or one a position."""
    hit_rate: str = "0.8"
    """Draft workers: share of verification results that were drafted ahead for."""

    @classmethod
    def parse(cls, text: str) -> Simulation:
        """Read `step_ms=20 link_ms=0.2`: names and values of the fields, separated by spaces.

        Raises:
            ValueError: a name is unknown, repeated or missing, or a value is outside its range.
        """
        names, given = [each.name for each in fields(cls)], dict[str, str]()
        for part in text.split():
            name, _, value = part.partition("=")
            if name not in names or name in given:
                raise ValueError(f"{part!r}: must be NAME=VALUE, each name once, of {', '.join(names)}")
            given[name] = value
        if "step_ms" not in given:
            raise ValueError("step_ms: must be given")
        link_ms = given.pop("link_ms", "0")
        made = cls(**given, link_ms=float(link_ms) if _is_number(link_ms) else -1.0)
        if not 0 <= made.link_ms <= MAX_STEP_MS:
            raise ValueError(f"link_ms = {link_ms}: must be 0 to {MAX_STEP_MS:g}")
        for name, check in (
            ("step_ms", SimulatedTimes.parse),
            ("acceptance", probabilities),
            ("hit_rate", probability),
        ):
            try:
                check(getattr(made, name))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return made

    @property
    def times(self) -> SimulatedTimes:
        """Times of a forward."""
        return SimulatedTimes.parse(self.step_ms)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
