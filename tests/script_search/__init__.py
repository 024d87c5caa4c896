"""Composes training scripts from habits at random, and counts those that break the promise."""
