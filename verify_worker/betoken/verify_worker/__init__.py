"""Verify worker: runs the target model over draft blocks and decides which tokens are the target's own."""
