"""Implements erasure codes over byte buffers, without files and networks."""
