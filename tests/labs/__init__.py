"""Runs real clusters, networks and stores on one machine, for the tests and benchmarks."""
