"""N-gram lookup as drafter."""
