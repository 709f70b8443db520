"""Rules that change logits before a token is chosen."""
