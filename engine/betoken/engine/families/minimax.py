"""MiniMax: lightning attention (MiniMax-01), GGUF files of M2, and what M3 is refused for."""

from betoken.engine.families.family import Architecture, Family, Given
from betoken.engine.mixers.lightning import LightningAttention, decay_names, restore_decays


def _finish(given: Given) -> None:
    given["use_routing_bias"] = True
    given.pop("scoring_func", None)


_M2_KEYS = {"expert_feed_forward_length": "intermediate_size"}

MINIMAX = Family(
    model_types=("minimax",),
    layer_types=frozenset({"linear_attention"}),
    mixers={"MiniMaxLightningAttention": LightningAttention},
    computed_buffers=decay_names,
    restore_buffers=restore_decays,
)

MINIMAX_M2 = Family(
    model_types=("minimax_m2",),
    gguf={"minimax-m2": Architecture("minimax_m2", "minimax_m2", _M2_KEYS, _finish, expert_gate=2)},
)

MINIMAX_M3 = Family(
    multimodal=("minimax_m3_vl",),
    refusal="its attention reads blocks of positions selected by a separate index",
)
