"""Runs the nodes of jobs as containers of a service on YARN."""
