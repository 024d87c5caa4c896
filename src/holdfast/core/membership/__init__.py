"""Decides who takes part in a job: coordinator, agent, views, leases, restarts. Pure."""
