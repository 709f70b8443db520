"""Tiny random draft layers."""

import torch

from betoken.drafters.eagle3.module import Eagle1Layer, Eagle3Layer
from betoken.drafters.eagle3.shape import EagleShape

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def tiny_shape(**fields):
    """For a target of 101 ids, 64 wide."""
    return EagleShape(
        **{
            "version": 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 8,
            "vocab_size": 101,
            "draft_vocab_size": 40,
            "target_hidden_size": 64,
            "max_context": 640,
        }
        | fields
    )


def tiny_layer(shape, seed=0, spread=0.25, dtype=torch.float32):
    """A layer with random weights of that spread; its ids are spread over the target's."""
    generator = torch.Generator().manual_seed(seed)
    layer = Eagle3Layer(shape) if shape.version == 3 else Eagle1Layer(shape)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if weight.dim() == 1 and "bias" not in name else spread * noise)
    if shape.version == 3:
        chosen = torch.randperm(shape.vocab_size, generator=generator)[: shape.draft_vocab_size].sort().values
        layer.d2t.copy_(chosen - torch.arange(len(chosen)))
        layer.t2d.zero_()[chosen] = True
    return layer.to(dtype).eval().requires_grad_(False)
