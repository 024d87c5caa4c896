"""Runs jobs on the nodes of a cluster manager: one contract, and an adapter for each manager."""
