"""Settings of lookahead."""

from collections.abc import Mapping
from dataclasses import dataclass

from betoken.common.errors import InvalidArgumentError
from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class LookaheadSettings(SequenceSettings):
    """The paper's W, N and G, and how far to iterate."""

    window: int = setting(15, "W of `lookahead`: columns of its window.", 2, 256, option="lookahead_window")
    ngram_size: int = setting(5, "N of `lookahead`: tokens of an n-gram.", 2, 64, option="lookahead_ngram_size")
    guesses: int = setting(15, "G of `lookahead`: most guesses per token.", 1, 256)
    steps: int = setting(1, "Most steps of `lookahead` after each draft.", 1, 64)
    seed_from_prompt: bool = setting(
        False,
        "Pool the n-grams of the text itself too, prompt and committed output.",
    )

    @property
    def num_rows(self) -> int:
        """Rows of one step in a forward."""
        return self.window * (self.ngram_size - 1)

    def override_within(self, settings: Mapping[str, str], max_rows: int) -> "LookaheadSettings":
        """These settings with a request's own, for forwards of at most `max_rows` rows.

        Raises:
            InvalidArgumentError: an unknown name, a value outside its limits, or a window beyond `max_rows`.
        """
        new = self.override(settings)
        if new.num_rows > max_rows:
            most = f"with ngram_size = {new.ngram_size} must be at most {max_rows // (new.ngram_size - 1)}"
            limit = f"{most}, as a forward has {max_rows} rows"
            raise InvalidArgumentError("drafter.settings.window", new.window, limit)
        return new
