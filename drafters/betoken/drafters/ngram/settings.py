"""Settings of n-gram lookup."""

from dataclasses import dataclass

from betoken.drafters.settings import SequenceSettings, setting


@dataclass(frozen=True, slots=True)
class NgramSettings(SequenceSettings):
    """How to look up."""

    min_ngram: int = setting(1, "Shortest match `ngram` drafts from, tokens.", 1, 1024)
    max_ngram: int = setting(0, "Longest match `ngram` looks for, tokens; 0 = any.", 0, 1024)
    max_branches: int = setting(4, "Children per node of an n-gram tree; 1 = chains.", 1, 16)
    draft_factor: int = setting(4, "Longest n-gram draft, in lengths of its match; 0 = no limit.", 0, 512)

    def conflict(self) -> tuple[str, str] | None:
        if self.max_ngram and self.min_ngram > self.max_ngram:
            return "min_ngram", f"must be at most max_ngram = {self.max_ngram}"
        return None
