"""Settings of the synthetic drafter."""

from dataclasses import dataclass

from betoken.common.synthetic import probabilities, probability
from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class SyntheticSettings(SequenceSettings):
    """Acceptance and hit rate of simulated drafts."""

    acceptance: str = setting("0.8", check=probabilities)
    """See `Simulation`."""
    hit_rate: str = setting("0.8", check=probability)
    """See `Simulation`."""
