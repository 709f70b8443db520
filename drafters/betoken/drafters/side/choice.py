"""Continuations of rows of the draft layer's scores, in the target's ids and under the request's rules.

Scores are of the draft's own ids. Noise, filters, penalties and grammars use the target's ids, so scores are first
laid out over those. Knows rows, not trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from betoken.engine.sampler import SampleGroup, perturbed_top
from betoken.engine.sampler.draft_probs import sample_drafts
from betoken.engine.sparse_probs import SparseProbs

Children = tuple[list[int], list[float]]
"""Ids, likeliest first, and their log-probabilities."""

_SCALE = 1.0
"""EAGLE-2 takes the layer's own probabilities; what they are worth is learned, see `Calibration`."""


class Chooser:
    """Chooses among the ids that a layer knows."""

    def __init__(self, target_ids: Tensor, vocab_size: int) -> None:
        """`target_ids`: [Vd] int64, the target's id of each of the draft's."""
        self._target_ids = target_ids
        self._vocab_size = vocab_size
        self._is_whole = len(target_ids) == vocab_size and bool(
            torch.equal(target_ids, torch.arange(vocab_size, device=target_ids.device))
        )

    def likeliest(self, scores: Tensor, groups: Sequence[SampleGroup], num_top: int) -> list[Children]:
        """The first candidates for every row's token, with the target's own noise.

        Args:
            scores: [L, Vd] float32.
            groups: one a row, without draft ids.
            num_top: most candidates of a row, at least 1.
        """
        is_plain = all(group.params.temperature == 0.0 and not _has_rules(group) for group in groups)
        laid_out = scores if is_plain else self._lay_out(scores)
        ids, log_probs = perturbed_top(laid_out, groups, num_top, _SCALE)
        if is_plain and not self._is_whole:
            ids = self._target_ids[ids]
        return list(zip(ids.tolist(), log_probs.tolist(), strict=True))

    def sampled(self, scores: Tensor, groups: Sequence[SampleGroup]) -> list[tuple[int, SparseProbs]]:
        """A token of every row with what it was sampled from, for verification by rejection; see `sample_drafts`."""
        return sample_drafts(self._lay_out(scores), groups)

    def _lay_out(self, scores: Tensor) -> Tensor:
        """[L, Vd] -> [L, V], -inf for ids unknown to the draft."""
        if self._is_whole:
            return scores.contiguous()
        return scores.new_full((len(scores), self._vocab_size), -torch.inf).index_copy_(1, self._target_ids, scores)


def _has_rules(group: SampleGroup) -> bool:
    return group.params.has_rules or (group.rules is not None and group.rules.has_grammar)
