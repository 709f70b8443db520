"""Doubles for tests: workers without a model."""
