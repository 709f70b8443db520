"""Comparisons with other engines' servers on the same GGUF files."""
