"""Settings of drafting with a Gemma-4 assistant."""

from dataclasses import dataclass

from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class Gemma4AssistantSettings(SequenceSettings):
    """Shape of the drafts."""

    max_depth: int = setting(6, "Ids of a draft of `gemma4_assistant`: passes of the assistant.", 1, 64)
