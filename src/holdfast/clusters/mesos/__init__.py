"""Runs the nodes of jobs as tasks of a framework on Mesos."""
