"""The forward by torch operators alone, on any device."""
