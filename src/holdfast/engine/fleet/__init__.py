"""Keeps the number of nodes that a job is to have, through a cluster manager."""
