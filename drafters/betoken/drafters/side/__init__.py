"""Common parts of attached drafters that run layers on the target's hidden states."""
