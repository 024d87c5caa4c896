"""Runs the nodes of jobs as pods of Kubernetes."""
