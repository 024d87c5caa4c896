"""Runs the coordinator: its process, its journal and its election."""
