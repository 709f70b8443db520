"""Recipes that make the embedded model pair: a small target and a draft distilled from it.

Workers, links and verification are unknown here; it writes Hugging Face directories and a model card.
"""
