"""Tries a training script on one and two workers, and compares the bits."""
