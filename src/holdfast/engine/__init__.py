"""Keeps the promise: the result of a job is a function of the job alone. Imports no product."""
