"""Holds what runs inside the training process: the only package that imports torch."""
