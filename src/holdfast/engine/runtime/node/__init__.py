"""Runs the processes of one node: agent, workers, checkpoint writer."""
