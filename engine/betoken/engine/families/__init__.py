"""One record per model family, found by model type.

A family that needs nothing beyond transformers' own code has no record. A new family is a new file, named below.
"""

from collections.abc import Mapping

from betoken.engine.families import (
    bloom,
    deepseek,
    falcon,
    gemma,
    glm,
    gpt2,
    gpt_neo,
    gpt_oss,
    gptj,
    hunyuan,
    kimi,
    lfm,
    llama,
    llama4,
    mamba,
    minimax,
    mpt,
    multimodal,
    olmo,
    phi,
    qwen,
    qwen_hybrid,
    recurrent_gemma,
    refused,
    starcoder,
    zamba,
)
from betoken.engine.families.family import Architecture, Family

# fmt: off
_FILES = (
    bloom, deepseek, falcon, gemma, glm, gpt2, gpt_neo, gpt_oss, gptj, hunyuan, kimi, lfm, llama, llama4, mamba,
    minimax, mpt, multimodal, olmo, phi, qwen, qwen_hybrid, recurrent_gemma, refused, starcoder, zamba,
)
# fmt: on
FAMILIES = tuple(record for file in _FILES for record in vars(file).values() if isinstance(record, Family))
_PLAIN = Family()
_BY_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}
_MULTIMODAL: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.multimodal}

SERVED_MULTIMODAL = frozenset(name for name, family in _MULTIMODAL.items() if not family.refusal)
"""Types of multimodal models whose text is served."""
REFUSED_MULTIMODAL: Mapping[str, str] = {name: family.refusal for name, family in _MULTIMODAL.items() if family.refusal}
"""Types of multimodal models whose text is rejected, and why."""
TOWERS = tuple(sorted({prefix for family in FAMILIES for prefix in family.towers}))
"""Prefixes of tensors of towers in checkpoints whose language model is named `model`."""
ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for family in FAMILIES for name, architecture in family.gguf.items()
}
"""GGUF architectures by `general.architecture`."""


def family_of(model_type: str) -> Family:
    """Return the family of a model type of a causal language model; an empty record if it needs nothing."""
    return _BY_TYPE.get(model_type, _PLAIN)
