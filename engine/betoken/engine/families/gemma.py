"""Gemma: GGUF files of Gemma 2 and 3, and the text of multimodal ones. RecurrentGemma has its own file."""

from collections.abc import Callable

from betoken.engine.families.family import Architecture, Family, Given

_SOFTCAPS = {name: name for name in ("attn_logit_softcapping", "final_logit_softcapping")}
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Layers of the 27B models, whose scores have another scale."""


def _finish(name: str) -> Callable[[Given], None]:
    def finish(given: Given) -> None:
        given["tie_word_embeddings"] = True
        is_largest = given["num_hidden_layers"] == _LARGEST[name]
        heads = given["hidden_size"] // given["num_attention_heads"]
        given["query_pre_attn_scalar"] = heads if is_largest else given["head_dim"]

    return finish


_GEMMA3_KEYS = {**_SOFTCAPS, "rope.freq_base_swa": "rope_local_base_freq"}

GEMMA = Family(
    model_types=("gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text"),
    multimodal=("gemma3", "gemma3n", "gemma4", "gemma4_unified"),
    gguf={
        "gemma2": Architecture("gemma2", "gemma2", _SOFTCAPS, _finish("gemma2")),
        "gemma3": Architecture("gemma3_text", "gemma3", _GEMMA3_KEYS, _finish("gemma3")),
    },
)

GEMMA4_ASSISTANT = Family(
    multimodal=("gemma4_assistant", "gemma4_unified_assistant"),
    refusal="it is the drafter of a Gemma-4 target, for --gemma4-assistant",
)

PALIGEMMA = Family(
    multimodal=("paligemma",), refusal="its mask lets the tokens of a prompt see each other, later ones included"
)
