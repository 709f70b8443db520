"""Common parts of attached drafters that run layers of their own on the target's hidden states."""
