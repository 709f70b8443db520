"""A PARD-2 model that reads the target's hidden states: each position's embedding includes those of the previous one.

The states of positions that the target took over from its prefix cache are missing: their rows then have none,
unless the draft model's own cache holds their KV. KV of such rows, and of later ones, is not
shared with other sequences. Masks repeat the last states. Knows no target, no links and no forwards of the target's.
Source: PARD-2, arXiv:2605.08632.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from betoken.drafters.drafter import DraftSequence
from betoken.drafters.features import FeatureSpan
from betoken.drafters.model.drafter import ModelDrafter
from betoken.drafters.model.sequence import DraftKV, Planned
from betoken.drafters.pard.vectors import PositionVectors


class FeaturePardDrafter(ModelDrafter):
    """Hosts one draft model for any number of sequences; a `FeatureReader`."""

    def __init__(
        self, *arguments: Any, project: Callable[[Tensor], Tensor], state_columns: Sequence[int], **options: Any
    ) -> None:
        """See `ModelDrafter`.

        Args:
            project: states [R, S, Ht] -> vectors [R, H] that are added to the embeddings of the next positions.
            state_columns: indices of the states among the received features, in the order of `project`.
        """
        super().__init__(*arguments, **options)
        self._project, self._columns = project, list(state_columns)
        self._vectors: dict[DraftSequence, PositionVectors] = {}
        self._next_vectors: Tensor | None = None
        """Vector of the position after each shared page [num_pages, H]: a sequence that takes pages over lacks it if
        the target has taken over the same tokens."""

    def open(self, sequence: DraftSequence) -> None:
        super().open(sequence)
        self._vectors[sequence] = PositionVectors()

    def close(self, sequence: DraftSequence) -> None:
        super().close(sequence)
        self._vectors.pop(sequence, None)

    def observe(self, spans: Sequence[FeatureSpan], features: Tensor) -> None:
        """See `FeatureReader`."""
        vectors = self._project(features[:, self._columns])
        for span in spans:
            self._vectors[span.sequence].add(span.first_position + 1, vectors[span.rows])

    def request(self, sequence: DraftSequence, num_tokens: int) -> None:
        """Queue a draft; an empty one if the last token's vector is not known, as before the prompt is computed."""
        super().request(sequence, num_tokens)
        # Before the first result it is chance whether the prompt is computed when a draft is requested.
        is_by_chance = sequence.draft_affects_output and not sequence.output_ids
        if is_by_chance or self._vectors[sequence].length < len(sequence.ids):
            self._caches[sequence].stop()

    def _start(self, seq: DraftSequence, kv: DraftKV) -> None:
        super()._start(seq, kv)
        vectors, end = self._vectors[seq], len(kv.kv_ids)
        vectors.shared_length = end
        if self._next_vectors is not None and end and not vectors.num_known(end, end + 1):
            vectors.add(end, self._next_vectors[kv.page_ids[end // self._runner.page_table.page_size - 1]][None])

    def _plan(self) -> list[Planned]:
        planned = super()._plan()
        for part in planned:
            segment, vectors = part.segment, self._vectors[part.sequence]
            end = min(segment.end, len(part.sequence.ids))
            segment.added = vectors.rows(segment.kv_length, end, segment.end - end)
        return planned

    def _note_written(self, planned: Sequence[Planned]) -> None:
        for part in planned:
            vectors, start = self._vectors[part.sequence], part.segment.kv_length
            if vectors.shared_length >= start:
                vectors.shared_length = start + vectors.num_known(start, part.segment.end)
                self._keep_next(self._caches[part.sequence].page_ids, vectors, start)
        super()._note_written(planned)

    def _keep_next(self, page_ids: Sequence[int], vectors: PositionVectors, start: int) -> None:
        """Keep the vector after each page that was filled from slot `start` on."""
        table = self._runner.page_table
        for page in range(start // table.page_size, vectors.shared_length // table.page_size):
            end = (page + 1) * table.page_size
            if vectors.num_known(end, end + 1) and (found := vectors.rows(end, end + 1, 0)) is not None:
                if self._next_vectors is None:
                    self._next_vectors = found.new_zeros(table.num_pages, found.shape[1])
                self._next_vectors[page_ids[page]] = found[0]

    def _num_shared(self, seq: DraftSequence, kv: DraftKV) -> int:
        return min(super()._num_shared(seq, kv), self._vectors[seq].shared_length)
