"""Decides what a member holds of the job's state, and exchanges of it with others. Pure."""
