"""Training recipes: the embedded model pair, and drafters for any target (small models, Medusa heads, EAGLE-3 layers).

A recipe writes weights in Hugging Face layout, with a model card.
"""
