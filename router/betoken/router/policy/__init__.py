"""What is decided by numbers: admission, whether and how much to draft."""
