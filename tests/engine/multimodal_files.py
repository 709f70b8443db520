"""Tiny random checkpoints of multimodal models, in the layouts of published files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    Gemma3nConfig,
    Gemma3nForCausalLM,
)

from tests.engine.tiny_multimodal import CONFIGS


class _TextOfGemma3n:
    """transformers' text class; the class of the whole model needs a tower of another library."""

    @staticmethod
    def _from_config(config: Gemma3nConfig) -> Gemma3nForCausalLM:
        return Gemma3nForCausalLM._from_config(config.text_config)

    @staticmethod
    def from_pretrained(directory: str, **keywords: Any) -> Gemma3nForCausalLM:
        config = Gemma3nConfig.from_pretrained(directory).text_config
        names = {"^model.language_model": "model"}
        return Gemma3nForCausalLM.from_pretrained(directory, config=config, key_mapping=names, **keywords)


def class_of(family: str) -> Any:
    """transformers' class of the whole model."""
    if family == "gemma3n":
        return _TextOfGemma3n
    kind = type(CONFIGS[family]())
    tables = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
    return next(table[kind] for table in tables if kind in table)


def save_multimodal(directory: Path, family: str) -> str:
    """Write a random model, towers included; returns its directory."""
    torch.manual_seed(0)
    model = class_of(family)._from_config(CONFIGS[family]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
    model.save_pretrained(directory)
    if family == "gemma3n":
        _rename(directory, "model.", "model.language_model.")
        CONFIGS[family]().save_pretrained(directory)
    if family == "kimi_k25":  # transformers would save names that it does not read
        _rename(directory, "language_model.model.blocks.", "language_model.model.layers.")
    return str(directory)


def _rename(directory: Path, old: str, new: str) -> None:
    """Give tensors whose names begin with `old` the beginning `new`."""
    weights = load_file(directory / "model.safetensors")
    named = {new + name.removeprefix(old) if name.startswith(old) else name: it for name, it in weights.items()}
    save_file(named, directory / "model.safetensors", metadata={"format": "pt"})
