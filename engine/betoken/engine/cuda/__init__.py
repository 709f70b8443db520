"""The forward on NVIDIA GPUs: row-invariant operators, captured graphs per bucket of rows, memory measured first."""
