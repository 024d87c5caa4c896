"""Injects faults into a run, by a script of them."""
