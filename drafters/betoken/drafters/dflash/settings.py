"""Settings of drafting with a block drafter."""

from dataclasses import dataclass

from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class DflashSettings(SequenceSettings):
    """How a block becomes a draft."""

    min_confidence: int = setting(0, "Confidence below which a token of DSpark ends the draft, per cent.", 0, 100)
