"""Links to workers: pools, sessions, circuits, identity."""
