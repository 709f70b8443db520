"""The forward on CPUs: packed layers, compiled calls."""
