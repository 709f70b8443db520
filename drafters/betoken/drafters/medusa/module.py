"""Medusa heads ready to run with a target: batch-invariant.

Knows tensors, not sequences, trees or files' names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from betoken.drafters.medusa.layouts import HeadsLayout
from betoken.engine.parts import ModelParts


class MedusaHeads:
    """Head i guesses token t + 2 + i from the target's state at position t, after the final norm.

    A residual block is x + SiLU(W x + b); an output layer follows the last, the head's own or the target's.
    """

    def __init__(self, layout: HeadsLayout, parts: ModelParts) -> None:
        """Reads and converts the tensors; takes a while. May run concurrently with the thread that owns the target."""
        self.num_heads = layout.num_heads
        self._parts = parts
        firsts = [head[0] for head in layout.blocks]
        has_bias = firsts[0][1] is not None
        bias = torch.cat([bias.read() for _, bias in firsts if bias is not None]) if has_bias else None
        self._first = parts.linear(torch.cat([weight.read() for weight, _ in firsts]), bias)
        """The first blocks of all heads, which read the same rows."""
        self._others: list[list[nn.Module]] = [
            [parts.linear(weight.read(), None if bias is None else bias.read()) for weight, bias in head[1:]]
            for head in layout.blocks
        ]
        self._outputs = [parts.linear(weight.read(), keeps_sums=True) for weight in layout.output_layers]
        self._token_map = None if layout.token_map is None else layout.token_map.read().long().to(parts.device)

    @torch.inference_mode()
    def logits(self, states: Tensor) -> Tensor:
        """States [N, H] -> logits [N, num_heads, V'] float32, where V' are the ids that they are `spread` from."""
        with self._parts.rows_alone():
            first = self._first(states).view(len(states), self.num_heads, -1)
            x = states[:, None] + functional.silu(first)
            if self._others[0]:
                x = torch.stack([self._through(blocks, x[:, i]) for i, blocks in enumerate(self._others)], dim=1)
        if not self._outputs:
            return self._parts.head(x)
        if len(self._outputs) == 1:
            out: Tensor = self._outputs[0](x)
            return out.float()
        return torch.stack([layer(x[:, i].contiguous()).float() for i, layer in enumerate(self._outputs)], dim=1)

    def spread(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Logits [..., V'] as logits [..., V] of the target's ids; ids without a row have -inf."""
        if self._token_map is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        wide[..., self._token_map] = logits
        return wide

    @staticmethod
    def _through(blocks: list[nn.Module], x: Tensor) -> Tensor:
        x = x.contiguous()
        for block in blocks:
            x = x + functional.silu(block(x))
        return x
