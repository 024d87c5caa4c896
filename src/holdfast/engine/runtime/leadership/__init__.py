"""Keeps the record of a job durable, and elects the coordinator that may write it."""
