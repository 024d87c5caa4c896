"""Runs the nodes of jobs as steps of batch jobs of Slurm."""
