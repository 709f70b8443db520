"""Hidden states of a frozen target, computed once and read in every epoch.

Knows files and rows, not drafters. A sample's rows are contiguous in `features.bin`, bfloat16, in the
order of the samples; a run that was interrupted goes on after the last whole sample.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from betoken.training.batches import Rows, pad
from betoken.training.samples import Sample
from betoken.training.teacher import Teacher

log = logging.getLogger("betoken.training")

_ROWS_AT_ONCE = 8
_LOG_EVERY_S = 20.0


class FeatureCache:
    """The last hidden states [len(ids), H] of each sample."""

    def __init__(self, path: Path, samples: Sequence[Sample], teacher: Teacher) -> None:
        """Compute what `path` lacks of these samples."""
        self._starts = np.cumsum([0, *(len(sample.ids) for sample in samples)])
        self._width = teacher.config.hidden_size
        self._fill(path, samples, teacher)
        stored = np.memmap(path, np.int16, "r", shape=(int(self._starts[-1]), self._width))
        self._rows = stored

    def __getitem__(self, index: int) -> torch.Tensor:
        """[len(ids), H] bfloat16 of sample `index`."""
        rows = self._rows[self._starts[index] : self._starts[index + 1]]
        return torch.from_numpy(rows.copy()).view(torch.bfloat16)

    def padded(self, rows: Rows) -> torch.Tensor:
        """[B, T, H] bfloat16 of the samples of a batch, zeros where padded."""
        hidden = torch.zeros(*rows.ids.shape, self._width, dtype=torch.bfloat16)
        for row, index in enumerate(rows.indices):
            own = self[index]
            hidden[row, : len(own)] = own
        return hidden.to(rows.ids.device)

    def _fill(self, path: Path, samples: Sequence[Sample], teacher: Teacher) -> None:
        row_bytes = 2 * self._width
        path.touch()
        num_whole = int(np.searchsorted(self._starts, path.stat().st_size // row_bytes, side="right")) - 1
        logged = time.monotonic()
        with path.open("r+b") as file:
            file.truncate(int(self._starts[num_whole]) * row_bytes)
            file.seek(0, 2)
            for first in range(num_whole, len(samples), _ROWS_AT_ONCE):
                chosen = samples[first : first + _ROWS_AT_ONCE]
                hidden = teacher.hidden(pad(chosen).ids.to(teacher.device)).to(torch.bfloat16).cpu()
                for row, sample in zip(hidden, chosen, strict=True):
                    file.write(row[: len(sample.ids)].contiguous().view(torch.int16).numpy().tobytes())
                if time.monotonic() - logged >= _LOG_EVERY_S:
                    logged = time.monotonic()
                    log.info("hidden states of %d of %d sequences", first + len(chosen), len(samples))
