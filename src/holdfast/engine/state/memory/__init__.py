"""Keeps pieces of a job's state in the memory of its nodes, and serves them to other nodes."""
