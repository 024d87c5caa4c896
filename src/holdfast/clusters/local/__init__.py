"""Runs the nodes of jobs as processes of this machine, to try things out."""
