"""The MTP layer of Nemotron-H: a block of attention and a block of experts, which transformers does not put together.

Source: vLLM, nemotron_h_mtp.py.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.modeling_layers import MtpModel

from betoken.engine.errors import ModelRefusedError

MODEL_TYPE = "nemotron_h"
_BLOCKS = ["full_attention", "moe"]


class Blocks(nn.ModuleList):
    """Blocks as one decoder layer."""

    def forward(self, hidden_states: Tensor, **keywords: Any) -> Tensor:
        """hidden_states [1, R, H] -> [1, R, H]."""
        for block in self:
            hidden_states = block(hidden_states, **keywords)
        return hidden_states


def settle(config: Any) -> None:
    """Make a configuration describe a target of the MTP layer's two blocks.

    Raises:
        ModelRefusedError: the layer has other blocks.
    """
    if (blocks := config.mtp_layers_block_type) != _BLOCKS:
        raise ModelRefusedError(f"mtp_layers_block_type: {blocks!r}: must be {_BLOCKS!r}")
    config.layers_block_type = config.mtp_layer_types = list(_BLOCKS)
    config.rms_norm_eps = config.layer_norm_epsilon


def put_together(target: Any, model: MtpModel) -> None:
    """Give the MTP layer both blocks, of the kinds of the target's."""
    block = type(target.get_decoder().layers[0])
    layer: Any = model.layers[0]
    layer.mtp_block = Blocks(block(model.config, number) for number in range(len(_BLOCKS)))
