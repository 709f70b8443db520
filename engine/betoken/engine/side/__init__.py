"""The forward of a drafter's layers over their own KV pages, on the target's device."""
