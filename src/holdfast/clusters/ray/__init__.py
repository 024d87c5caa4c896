"""Runs the nodes of jobs as actors of a Ray cluster."""
