"""Decides which workers take part in a job: coordinator, agent, views, leases, restarts. Pure."""
