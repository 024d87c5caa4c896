"""Captures the job's state, stages it, sends it to joiners and restores it."""
