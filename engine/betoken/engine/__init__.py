"""Paged KV, flat ragged batches and a runner over unmodified transformers models; sampling as the target defines it."""
