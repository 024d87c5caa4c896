"""Holds erasure codes over byte buffers; knows no files and no networks."""
