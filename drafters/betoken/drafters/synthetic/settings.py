"""Settings of the synthetic drafter."""

from dataclasses import dataclass

from betoken.common.synthetic import probabilities, probability
from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class SyntheticSettings(SequenceSettings):
    """Acceptance and hit rate of simulated drafts."""

    acceptance: str = setting(
        "0.8",
        "Acceptance probability of a draft token of `synthetic` if all tokens before it are accepted, 0 to 1; or one"
        " per draft position (0.9,0.8,0.7).",
        option="synthetic_acceptance",
        check=probabilities,
    )
    hit_rate: str = setting(
        "0.8",
        "Share of verification results that `synthetic` has drafted ahead for, with --overlap on of the router, 0 to"
        " 1.",
        option="synthetic_hit_rate",
        check=probability,
    )
