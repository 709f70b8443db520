"""Names of MTP tensors in published checkpoints, and the names that transformers' `MtpModel` gives them.

Knows names and configurations, not tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from betoken.engine.weights.gguf.mtp_layer import NEXTN

_LANGUAGE_MODEL = re.compile(r"^(model\.)?(language_model|text_model)\.(model\.)?")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "rotary_emb.inv_freq")
"""Ends of names of copies of the target's tensors, which are not read."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Names of one kind of checkpoint."""

    prefix: str
    """Prefix of the tensors of an MTP layer. `{index}` is the layer's index, `{layer}` its place after the target's
    layers. Without either there is one MTP layer."""
    parts: Mapping[str, str]
    """Beginnings of names after the prefix -> their beginnings below `MtpLayer`; others are the block's."""
    block: str = ""
    """Beginning of the block's names after the prefix."""
    attention: str = "full_attention"
    """Attention of the layer, if the configuration does not name it."""
    mlp: str = "sparse"
    """Kind of its MLP in targets that have dense and sparse ones, if the configuration does not name it."""

    @property
    def has_several(self) -> bool:
        """Whether checkpoints may hold several layers, one for each depth of a draft."""
        return "{" in self.prefix

    def prefix_of(self, num_layers: int, index: int = 0) -> str:
        """Prefix of the tensors of an MTP layer of a target with `num_layers` layers."""
        return self.prefix.format(layer=num_layers + index, index=index)

    def own_name(self, name: str, num_layers: int, index: int = 0) -> str | None:
        """Name in `MtpModel` of a tensor of the checkpoint; empty for a copy of the target's; None if it is not a
        tensor of that MTP layer."""
        plain, prefix = _LANGUAGE_MODEL.sub("model.", name), self.prefix_of(num_layers, index)
        if not plain.startswith(prefix):
            return None
        rest = plain.removeprefix(prefix)
        if rest.endswith(_COPIES):
            return ""
        for stored, own in self.parts.items():
            if rest.startswith(stored):
                return f"layers.0.{own}{rest.removeprefix(stored)}"
        if not rest.startswith(self.block):
            return None if rest.startswith("layers.") else f"layers.0.{rest}"
        return f"layers.0.mtp_block.{rest.removeprefix(self.block)}"

    def stored_name(self, own_name: str, num_layers: int, index: int = 0) -> str:
        """Name in the checkpoint of a tensor of `MtpModel`."""
        prefix, rest = self.prefix_of(num_layers, index), own_name.removeprefix("layers.0.")
        for stored, own in self.parts.items():
            if rest.startswith(own):
                return f"{prefix}{stored}{rest.removeprefix(own)}"
        return f"{prefix}{self.block}{rest.removeprefix('mtp_block.')}"


QWEN = Layout(
    "mtp.",
    {"fc.": "eh_proj.", "pre_fc_norm_embedding.": "enorm.", "pre_fc_norm_hidden.": "hnorm.", "norm.": "post_norm."},
    "layers.0.",
)
DEEPSEEK = Layout(
    "model.layers.{layer}.",
    {"eh_proj.": "eh_proj.", "enorm.": "enorm.", "hnorm.": "hnorm.", "shared_head.norm.": "post_norm."},
)
MELLUM = replace(QWEN, attention="sliding_attention")
MIMO_V2 = Layout(
    "model.mtp.layers.{index}.",
    {
        "eh_proj.": "eh_proj.",
        "enorm.": "enorm.",
        "hnorm.": "hnorm.",
        "final_layernorm.": "post_norm.",
        "pre_mlp_layernorm.": "mtp_block.post_attention_layernorm.",
    },
    attention="sliding_attention",
    mlp="dense",
)
NEMOTRON = Layout(
    "mtp.layers.",
    {"0.eh_proj.": "eh_proj.", "0.enorm.": "enorm.", "0.hnorm.": "hnorm.", "1.final_layernorm.": "post_norm."},
)
GGUF = Layout("blk.{layer}.", NEXTN)

LAYOUTS: Mapping[str, Layout] = {
    "qwen3_next": QWEN,
    "qwen3_5_text": QWEN,
    "qwen3_5_moe_text": QWEN,
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "bailing_hybrid": DEEPSEEK,
    "mellum": MELLUM,
    "mimo_v2_flash": MIMO_V2,
    "nemotron_h": NEMOTRON,
}
"""Layouts by the model type of the language model."""
