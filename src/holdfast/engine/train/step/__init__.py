"""Carries out steps in a worker: buckets, reduction, and the driver of the pure step."""
