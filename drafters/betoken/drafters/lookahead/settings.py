"""A sequence's settings of its lookahead; the worker's options are the defaults."""

from collections.abc import Mapping
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.settings import check_names, integer

MAX_WINDOW = 256
MAX_NGRAM_SIZE = 64
MAX_GUESSES = 256
MAX_STEPS = 64


@dataclass(frozen=True, slots=True)
class LookaheadSettings:
    """The paper's W, N and G, and how far to iterate; every field may be set per sequence by its name."""

    window: int = 15
    """W: columns of the window."""
    ngram_size: int = 5
    """N: tokens of an n-gram; a guess has one less."""
    guesses: int = 15
    """G: most n-grams kept, and proposed, per first token."""
    steps: int = 1
    """Most steps after each draft, while the target verifies it."""
    seed_from_prompt: bool = False
    """Whether the n-grams of the text itself, prompt and committed output, go into the pool too."""

    @property
    def num_rows(self) -> int:
        """Rows of one step in a forward."""
        return self.window * (self.ngram_size - 1)

    def override(self, settings: Mapping[str, str], max_rows: int) -> "LookaheadSettings":
        """These settings with a sequence's own.

        Raises:
            InvalidArgumentError: an unknown name, a value outside its limits, or a window beyond `max_rows`.
        """
        check_names(settings, tuple(self.__slots__))
        new = LookaheadSettings(
            integer(settings, "window", self.window, 2, MAX_WINDOW),
            integer(settings, "ngram_size", self.ngram_size, 2, MAX_NGRAM_SIZE),
            integer(settings, "guesses", self.guesses, 1, MAX_GUESSES),
            integer(settings, "steps", self.steps, 1, MAX_STEPS),
            bool(integer(settings, "seed_from_prompt", int(self.seed_from_prompt), 0, 1)),
        )
        if new.num_rows > max_rows:
            most = f"with ngram_size = {new.ngram_size} must be at most {max_rows // (new.ngram_size - 1)}"
            limit = f"{most}, as a forward has {max_rows} rows"
            raise InvalidArgumentError("drafter.settings.window", new.window, limit)
        return new
