"""A small model as drafter: chains and trees."""
