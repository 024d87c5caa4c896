"""Keeps states outside of workers: checkpoints, the memory of nodes, and erasure codes."""
