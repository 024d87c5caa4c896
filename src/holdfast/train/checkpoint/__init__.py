"""The job's state: captured, staged, sent to joiners, restored."""
