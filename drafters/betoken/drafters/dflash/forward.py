"""A block drafter's layers over their own paged KV cache, batched over sequences, on the target's device.

It knows rows, pages and tensors; no sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from betoken.drafters.dflash.checkpoint import LoadedBlock
from betoken.drafters.dflash.heads import FollowingHead
from betoken.drafters.side.weights import kv_shape
from betoken.engine.attention import Scoring
from betoken.engine.batch import Batch
from betoken.engine.parts import ModelParts
from betoken.engine.side.forward import SideForward


class BlockForward:
    """Changes the loaded model in place."""

    def __init__(
        self, loaded: LoadedBlock, parts: ModelParts, num_pages: int, page_size: int, cache_dir: Path | None = None
    ) -> None:
        """Args:
        parts: the target's, whose type, device and kind of products it shares.
        num_pages: pages of the cache; there is one more, which belongs to no sequence.
        cache_dir: folder of the CPU kernels.
        """
        self.shape = loaded.shape
        self._model, self._parts = loaded.model, parts
        self._embedding = None if loaded.embedding is None else loaded.embedding.to(parts.device, parts.dtype)
        self._scoring = Scoring(self.shape.head_dim**-0.5, self.shape.window if self.shape.is_causal else 0, 0.0, None)
        shapes = dict.fromkeys(range(self.shape.num_layers), kv_shape(self.shape))
        self._forward = SideForward(self._run, loaded.model, shapes, parts, num_pages, page_size, cache_dir)
        self._model.d2t = self._model.d2t.to(parts.device)

    @property
    def target_ids(self) -> Tensor:
        """[Vd] int64: the target's id of each of the draft's."""
        return torch.arange(len(self._model.d2t), device=self._model.d2t.device) + self._model.d2t

    @property
    def following_head(self) -> FollowingHead | None:
        """Head by which tokens of a block depend on those before them; None if they do not."""
        return self._model.markov_head or self._model.candidate_selector

    @property
    def is_compiled(self) -> bool:
        """Whether the layers run as one compiled function."""
        return self._forward.is_compiled

    def compile(self, cache_dir: Path) -> None:
        """Run as one compiled function from now on, if the CPU kernels are available and it compiles."""
        self._forward.compile(self._make_inputs, cache_dir)

    def record(self, max_rows: int, max_length: int) -> None:
        """Record forwards of up to `max_rows` rows of sequences of up to `max_length` tokens as CUDA graphs."""
        self._forward.record(self._make_inputs, max_rows, max_length)

    @torch.inference_mode()
    def fuse(self, features: Tensor) -> Tensor:
        """Features [R, S, Ht] of the target -> context [R, H]."""
        with self._parts.rows_alone():
            return self._model.fuse(features.flatten(1))

    def __call__(self, batch: Batch, hidden: Tensor) -> tuple[Tensor, ...]:
        """Write the KV of the batch's rows. Rows that yield logits are tokens of whole blocks; the others are context
        [R, H]. Returns [L, H], which the output layer reads."""
        places = torch.full((batch.num_rows, 2), -1, dtype=torch.int64)
        index = torch.arange(len(batch.logit_rows))
        rows = torch.tensor(batch.logit_rows, dtype=torch.int64)
        places[rows] = torch.stack((index, index % self.shape.block_size), dim=1)
        return self._forward(batch, hidden, places.to(self._parts.device))

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """[N, H] -> scores [N, Vd] float32 of the draft's ids, before any following head."""
        head = self._model.lm_head
        with self._parts.rows_alone():
            logits = self._parts.head(states) if head is None else head(states).float()
            logits = logits * self.shape.output_multiplier if self.shape.output_multiplier != 1.0 else logits
            cap = self.shape.softcap
            return torch.tanh(logits / cap) * cap if cap else logits

    @torch.inference_mode()
    def correct(self, scores: Tensor, hidden: Tensor, previous: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `FollowingHead`."""
        head = self.following_head
        assert head is not None, "the scores of a position are final"
        with self._parts.rows_alone():
            return head.correct(scores, hidden, previous, state)

    @torch.inference_mode()
    def confidences(self, hidden: Tensor, previous: Tensor) -> list[float] | None:
        """Probabilities [N] that the tokens of positions are accepted; None without a confidence head."""
        head, markov = self._model.confidence_head, self._model.markov_head
        if head is None:
            return None
        with self._parts.rows_alone():
            latent = markov.markov_w1(previous) if markov is not None and head.reads_markov else None
            confidences: list[float] = head(hidden, latent).tolist()
            return confidences

    def _make_inputs(self, num_rows: int) -> Sequence[Tensor]:
        hidden = torch.zeros(num_rows, self.shape.hidden_size, dtype=self._parts.dtype, device=self._parts.device)
        return hidden, torch.zeros(num_rows, 2, dtype=torch.int64, device=self._parts.device)

    def _run(
        self, hidden: Tensor, places: Tensor, token_ids: Tensor, positions: Tensor, rows: Tensor
    ) -> tuple[Tensor, ...]:
        """hidden [R, H], places [R, 2], token ids [R], positions [R], rows [L] -> [L, H]."""
        assert hidden.shape[1] == self.shape.hidden_size, "the tracer takes the width for a number of rows"
        ids = token_ids.index_select(0, rows)
        embedded = self._parts.embed(ids) if self._embedding is None else functional.embedding(ids, self._embedding)
        return (self._model.run(hidden, embedded, places, positions, self._attend, rows),)

    def _attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self._forward.attend(layer, query, key, value, self._scoring)
