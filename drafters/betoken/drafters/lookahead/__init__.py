"""Lookahead decoding as a drafter: Jacobi trajectories on the draft worker's own device, their n-grams as guesses."""
