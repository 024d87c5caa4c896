"""Decide whether this machine is fit to train: measurements, checks and a history of them."""
