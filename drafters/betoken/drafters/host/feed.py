"""Selects the rows of a forward with hidden states of committed ids, and sends them to attached drafters.

Knows drafters, sequences and tensors; knows no forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from betoken.drafters.drafter import Drafter, DraftSequence
from betoken.drafters.features import FeatureReader, FeatureSpan
from betoken.drafters.registry import SPECS
from betoken.engine.runner import ModelRunner
from betoken.rpc.link.worker_load import SequenceKey


@dataclass(slots=True)
class CommittedRows:
    """Rows of one forward, whose features the next one overwrites."""

    features: torch.Tensor | None
    """Hidden states [R, num_layers, H]; None if unused."""
    rows: dict[SequenceKey, tuple[int, list[int]]] = field(default_factory=dict)
    """First position and rows, by the sequence that they are of; in the order of positions."""

    def add(self, key: SequenceKey, first_position: int, first_row: int, num_prefill: int, path: Sequence[int]) -> None:
        """Rows of a sequence: its prefill, then, if a block was decided, the last committed id and the accepted nodes.

        `path`: positions after the prefill, 0 for the last committed id.
        """
        if self.features is not None:
            block = first_row + num_prefill
            self.rows[key] = (first_position, [*range(first_row, block), *(block + place for place in path)])

    def alone(self, key: SequenceKey) -> CommittedRows | None:
        """A sequence's rows in separate memory; None if it has none."""
        found = self.rows.get(key)
        if self.features is None or found is None:
            return None
        first_position, rows = found
        return CommittedRows(self.features[rows], {key: (first_position, list(range(len(rows))))})


class FeatureFeed:
    """Sends drafters the rows of the layers that each reads."""

    def __init__(
        self,
        layers: Mapping[str, Sequence[int]] | None = None,
        runner_layers: Sequence[int] = (),
        whole_text: Collection[str] = (),
        steering_by_whole_text: Collection[str] = (),
    ) -> None:
        """Args:
        layers: of each drafter that reads some, ascending, each once, from 0.
        runner_layers: layers returned by forwards.
        whole_text: drafters that read the rows of all positions.
        steering_by_whole_text: drafters that do so where tokens depend on drafts.
        """
        self._columns = {
            name: [runner_layers.index(layer) for layer in wanted] for name, wanted in (layers or {}).items()
        }
        self._whole_text = frozenset(whole_text)
        self._steering_by_whole_text = self._whole_text.union(steering_by_whole_text)

    @classmethod
    def of_attached(cls, settings: Any, target: ModelRunner) -> FeatureFeed:
        """The feed of the attached drafters that the settings name."""
        needs = {name: need for name in settings.attached_drafters if (need := SPECS[name].features) is not None}
        num_layers = target.parts.num_layers
        layers = {
            name: sorted({layer % (num_layers + 1) for layer in need.layers(settings, num_layers)})
            for name, need in needs.items()
        }
        layers = {name: read for name, read in layers.items() if read}
        return cls(
            layers,
            target.feature_layers,
            [name for name in layers if needs[name].of_whole_text],
            [name for name in layers if needs[name].steers_by_whole_text],
        )

    def reads(self, name: str) -> bool:
        """Whether the drafter of this name reads features."""
        return name in self._columns

    def reads_whole_text(self, name: str, draft_affects_output: bool) -> bool:
        """Whether it reads the rows of all positions of a sequence; `draft_affects_output`: tokens depend on drafts."""
        return name in (self._steering_by_whole_text if draft_affects_output else self._whole_text)

    def send(self, name: str, drafter: Drafter, sequences: Iterable[DraftSequence], committed: CommittedRows) -> None:
        """Send one drafter the rows of its sequences, one call for all.

        Raises:
            Exception: whatever the drafter raises.
        """
        spans: list[FeatureSpan] = []
        rows: list[int] = []
        for sequence in sequences:
            if (found := committed.rows.get(sequence.key)) is not None:
                first_position, own = found
                spans.append(FeatureSpan(sequence, first_position, len(rows), len(own)))
                rows += own
        if not spans or committed.features is None:
            return
        index = torch.tensor(rows, device=committed.features.device)
        features = committed.features.index_select(0, index)
        columns = self._columns[name]
        if len(columns) < features.shape[1]:
            features = features[:, columns]
        cast(FeatureReader, drafter).observe(spans, features)
