"""Benchmarks and the demo: one file per question, real processes, last stdout line one JSON object."""
