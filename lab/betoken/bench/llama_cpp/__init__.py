"""Comparisons with llama.cpp on the same GGUF file, sides in turn."""
