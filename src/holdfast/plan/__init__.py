"""Predicts what a job will cost on a cluster that need not exist yet; imports core alone."""
