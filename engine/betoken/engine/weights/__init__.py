"""Checkpoints: formats, loading, fingerprints."""
