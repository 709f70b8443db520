"""Recipes that make the embedded model pair: a small target and a draft distilled from it.

Nothing here knows of workers, links or verification; it writes Hugging Face directories and a model card.
"""
