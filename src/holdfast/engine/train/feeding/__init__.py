"""Feeds a worker that is no member yet with the state and reduced gradients, and takes them in."""
