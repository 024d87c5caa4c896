"""Runs inside the training process; this is the only package that imports torch."""
