"""Decisions by numbers: admission, whether and how much to draft."""
