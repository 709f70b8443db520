"""Checks of a machine before a model is loaded: `betoken doctor`."""
