"""GGUF files: their header, and the tokenizer in it. It knows the format, not models or arithmetic."""

from betoken.common.gguf.end_tokens import end_tokens
from betoken.common.gguf.header import GgufError, GgufHeader, GgufTensor, find_gguf, read_header
from betoken.common.gguf.tokenizer import GgufTokenizer, read_tokenizer

__all__ = [
    "GgufError",
    "GgufHeader",
    "GgufTensor",
    "GgufTokenizer",
    "end_tokens",
    "find_gguf",
    "read_header",
    "read_tokenizer",
]
