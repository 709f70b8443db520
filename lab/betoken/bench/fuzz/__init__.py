"""Mutants of every message against running services: what answers, and whether anything is left behind."""
