"""A GGUF file as a model: its configuration, and its weights in their own blocks.

It knows how llama.cpp names keys and tensors, through transformers' tables; whatever neither reads is refused by name.
"""

from betoken.engine.weights.gguf.configuration import read_config
from betoken.engine.weights.gguf.tensors import hash_header, load

__all__ = ["hash_header", "load", "read_config"]
