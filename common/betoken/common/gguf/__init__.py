"""GGUF files: their header, tokenizer and default sampling. It knows the format, not models or arithmetic."""

from betoken.common.gguf.end_tokens import end_tokens
from betoken.common.gguf.header import GgufError, GgufHeader, GgufTensor
from betoken.common.gguf.hub_file import fetch_hub_file
from betoken.common.gguf.parts import find_gguf, read_header, whole_name
from betoken.common.gguf.sampling import default_sampling
from betoken.common.gguf.tokenizer import GgufTokenizer, read_tokenizer

__all__ = [
    "GgufError",
    "GgufHeader",
    "GgufTensor",
    "GgufTokenizer",
    "default_sampling",
    "end_tokens",
    "fetch_hub_file",
    "find_gguf",
    "read_header",
    "read_tokenizer",
    "whole_name",
]
