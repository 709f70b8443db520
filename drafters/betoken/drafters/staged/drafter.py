"""Two stages: n-grams guess what the small model says, which verifies them and drafts for the target.

The small model's drafts are what they would be without the n-grams; they take fewer forwards. A PARD model takes one
forward in any case, so it receives no guesses. Knows no tensors.
Source: Spector and Re, "Accelerating LLM Inference with Staged Speculative Decoding", arXiv:2308.04623.
"""

from betoken.drafters.drafter import Drafted, DraftSequence
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.ngram.drafter import NgramLookup
from betoken.drafters.ngram.settings import NgramSettings


class StagedDrafter:
    """A model drafter that takes a sequence's n-gram guesses as its first candidates. Settings: the fields of
    `NgramSettings`."""

    def __init__(self, model: ModelDrafter, settings: NgramSettings) -> None:
        """`model` may be hosted by itself too: sequences of both then share its forwards."""
        self._model = model
        self._settings = settings

    @property
    def mask_token_id(self) -> int | None:
        """See `ModelDrafter`."""
        return self._model.mask_token_id

    @property
    def has_work(self) -> bool:
        return self._model.has_work

    def open(self, sequence: DraftSequence) -> None:
        lookup = NgramLookup(self._settings.override(sequence.settings), sequence.ids)
        self._model.open_guessed(sequence, lookup)

    def commit(self, sequence: DraftSequence, ids: list[int]) -> None:
        self._model.commit(sequence, ids)

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        self._model.request(sequence, num_tokens)

    def close(self, sequence: DraftSequence) -> None:
        self._model.close(sequence)

    def step(self) -> list[Drafted]:
        return self._model.step()

    def check_integrity(self) -> None:
        self._model.check_integrity()
